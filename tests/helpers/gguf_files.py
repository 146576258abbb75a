"""GGUF files as llama.cpp's converter would write them."""

from __future__ import annotations

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

F32 = GGMLQuantizationType.F32


def interleaved(rows, num_heads):
    """As llama.cpp's converter reorders the rows of q and k of a Llama model."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def convert(
    model, path, *, arch="llama", tensor_type=F32, metadata=(), extra_tensors=(), tokens=None
):
    """Write a transformers model as llama.cpp's converter would."""
    config = model.config
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = tokens or [str(i) for i in range(config.vocab_size)]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    for key, add, value in metadata:
        getattr(writer, add)(key, value)
    known = gguf.MODEL_ARCH[arch.upper() if arch.startswith("qwen") else "LLAMA"]
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            data = interleaved(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = interleaved(data, config.num_key_value_heads)
        own_type = tensor_type if data.ndim == 2 else F32
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(new_name, quantize(data, own_type), raw_dtype=own_type)
    for name, data in extra_tensors:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: Settings of a small model of any family.
SMALL = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


def write_gguf(path, name="Q4_1", family="llama", tied=True, **changes):
    """A small random model with matrices of a type; ``changes`` of its config."""
    torch.manual_seed(0)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    config = config_class(**SMALL | {"tie_word_embeddings": tied} | changes)
    model = model_class(config).eval()
    return convert(model, path, arch=family, tensor_type=GGMLQuantizationType[name])

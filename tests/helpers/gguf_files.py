"""GGUF files as llama.cpp's converter would write them."""

from __future__ import annotations

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from helpers.gguf_keys import add_keys
from helpers.gguf_tensors import converted_tensors

F32 = GGMLQuantizationType.F32


def write_converted(
    path, arch, config, stored, *, tensor_type=F32, metadata=(), extra_tensors=(), tokens=None
):
    """Write a checkpoint, its config and its tensors by name, with matrices of a type."""
    writer = GGUFWriter(path, arch)
    add_keys(writer, arch, config)
    tokens = tokens or [str(i) for i in range(config["vocab_size"])]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    for key, add, value in metadata:
        getattr(writer, add)(key, value)
    for name, data in converted_tensors(arch, config, stored):
        is_matrix = data.ndim > 1 and name.endswith(".weight")
        fits = data.shape[-1] % gguf.GGML_QUANT_SIZES[tensor_type][0] == 0
        own = tensor_type if is_matrix and fits and "gate_inp" not in name else F32
        writer.add_tensor(name, quantize(data.contiguous().numpy(), own), raw_dtype=own)
    for name, data in extra_tensors:
        writer.add_tensor(name, data)
    return written(writer, path)


def convert(model, path, *, arch="llama", **options):
    """Write a transformers model; ``options`` of ``write_converted``."""
    config, stored = model.config.to_dict(), model.state_dict()
    if config["tie_word_embeddings"]:
        del stored["lm_head.weight"]
    return write_converted(path, arch, config, stored, **options)


def rewritten(path, to, metadata=(), tensors=(), **options):
    """A copy of a GGUF file with other keys and tensors.

    Args:
        metadata: values and their types by key; a value of None leaves the key out.
        tensors: arrays by name, or pairs of bytes and their type; None leaves the tensor out.
        options: of ``GGUFWriter``, which may split the file.
    """
    reader, writer = gguf.GGUFReader(path), GGUFWriter(to, "", **options)
    fields = {
        key: (field.contents(), field.types[0], field.types[-1])
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    writer.kv_data[0].clear()
    for key, (value, *types) in (fields | dict(metadata)).items():
        if value is not None:
            writer.add_key_value(key, value, *types)
    stored = {one.name: (one.data, one.tensor_type) for one in reader.tensors}
    for name, given in (stored | dict(tensors)).items():
        if given is not None:
            data, own_type = given if isinstance(given, tuple) else (given, None)
            writer.add_tensor(name, data, raw_dtype=own_type)
    return written(writer, to)


def split(path, to, most):
    """The paths of a GGUF file's tensors in files of at most ``most``, as gguf-split names them."""
    rewritten(path, to, split_max_tensors=most)
    return sorted(to.parent.glob(f"{to.stem}-*-of-*.gguf"))


def written(writer, path):
    """Write a file of what the writer was given; the path."""
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

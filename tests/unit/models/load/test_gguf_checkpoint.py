"""GGUF checkpoints against the Hugging Face checkpoints they are converted from."""

from __future__ import annotations

import contextlib

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from helpers.examples import FIXED
from helpers.forward import Bench, load
from helpers.gguf_families import FAMILIES, write_family_gguf
from helpers.gguf_files import SMALL, convert, rewritten, written
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.load import sources
from sametoken.models.loader import read_config

transformers_logging.disable_progress_bar()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
UINT32, BOOL = ((kind, kind) for kind in (gguf.GGUFValueType.UINT32, gguf.GGUFValueType.BOOL))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def changed(path, metadata=(), tensors=()):
    return rewritten(path, path.with_name("changed.gguf"), metadata, tensors)


def make_model(config_class, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SMALL | options))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model.eval()


def llama_file(folder, **options):
    return convert(make_model(LlamaConfig), folder / "model.gguf", **options)


def assert_same_logits(model, path):
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    found = Bench(load(path)).logits(PROMPT, [3])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("config_class", "arch"), [(LlamaConfig, "llama"), (Qwen3Config, "qwen3")])
def test_same_model_as_the_original(tmp_path, config_class, arch, tied, bias):
    model = make_model(config_class, tie_word_embeddings=tied, attention_bias=bias)
    path = convert(model, tmp_path / "model.gguf", arch=arch)
    assert_same_logits(model, path)
    config = read_config(path)
    assert (config.tie_word_embeddings, config.attention_bias) == (tied, bias)
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (48, 32, 2)


def test_biases_of_q_k_and_v_alone(tmp_path):
    model = make_model(Qwen2Config, head_dim=32)
    assert_same_logits(model, convert(model, tmp_path / "model.gguf", arch="qwen2"))


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_family_has_the_logits_of_the_checkpoint_that_it_is_made_of(tmp_path, arch):
    """The positions are more than a window's, and than those that a rope is scaled from."""
    directory, path = write_family_gguf(tmp_path / "model", arch)
    prompt = PROMPT * 3
    found, wanted = (Bench(load(each)).logits(prompt, [3]) for each in (path, directory))
    assert torch.equal(found, wanted)
    assert found.std() > 0.3


def test_small_chunks_change_nothing(tmp_path, monkeypatch):
    path = convert(make_model(LlamaConfig, attention_bias=True), tmp_path / "model.gguf")
    expected = Bench(load(path)).logits(PROMPT, [])
    monkeypatch.setattr(sources, "CHUNK_ELEMENTS", 150)
    assert torch.equal(Bench(load(path)).logits(PROMPT, []), expected)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_tensors_equal_their_dequantized_values(tmp_path, name):
    tensor_type = GGMLQuantizationType[name]
    model = make_model(LlamaConfig)
    path = convert(model, tmp_path / "model.gguf", tensor_type=tensor_type)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            rounded = dequantize(quantize(parameter.detach().numpy(), tensor_type), tensor_type)
            parameter.data = torch.from_numpy(rounded.copy())
    assert_same_logits(model, path)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_k_quants_equal_what_the_gguf_package_reads(tmp_path, name):
    tensor_type = GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[tensor_type]
    model = make_model(LlamaConfig, hidden_size=256, intermediate_size=256)
    raw = np.random.default_rng(0).integers(0, 50, (256, 256 // elements * size), np.uint8)
    path = convert(model, tmp_path / "plain.gguf")
    mixed = changed(path, tensors={"blk.1.ffn_down.weight": (raw, tensor_type)})
    found = load(mixed).layers[1].mlp.down.weight.matrix
    assert torch.equal(found, torch.from_numpy(dequantize(raw, tensor_type)))
    assert found.abs().max() > 0


def test_llama3_frequency_divisors(tmp_path):
    model = make_model(LlamaConfig, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config)
    default = 1.0 / 1000.0 ** (torch.arange(0, 32, 2) / 32)
    divisors = (default / scaled).numpy()
    assert divisors.max() == pytest.approx(8.0)
    extra = [("rope_freqs.weight", divisors)]
    assert_same_logits(model, convert(model, tmp_path / "model.gguf", extra_tensors=extra))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
        },
    ],
)
def test_rope_scaling(tmp_path, rope):
    model = make_model(LlamaConfig, rope_parameters={"rope_theta": 1000.0, **rope})
    assert_same_logits(model, convert(model, tmp_path / "model.gguf"))


def test_a_factor_without_a_type_is_linear(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}
    model = make_model(LlamaConfig, rope_parameters=rope)
    path = convert(model, tmp_path / "model.gguf")
    without = {"llama.rope.scaling.type": (None, *UINT32)}
    assert_same_logits(model, changed(path, without))


def test_a_factor_of_the_type_none_is_none(tmp_path):
    model = make_model(LlamaConfig)
    metadata = [
        ("llama.rope.scaling.type", "add_string", "none"),
        ("llama.rope.scaling.factor", "add_float32", 2.0),
    ]
    assert_same_logits(model, convert(model, tmp_path / "model.gguf", metadata=metadata))


def test_end_ids_and_dtype(tmp_path):
    metadata = [
        ("tokenizer.ggml.eos_token_id", "add_uint32", 2),
        ("tokenizer.ggml.eot_token_id", "add_uint32", 5),
        ("tokenizer.ggml.eom_token_id", "add_uint32", 2),
        ("tokenizer.ggml.bos_token_id", "add_uint32", 1),
        ("general.file_type", "add_uint32", 0),
    ]
    config = read_config(llama_file(tmp_path, metadata=metadata))
    assert config.eos_token_ids == (2, 5)
    assert config.bos_token_id == 1
    assert config.dtype == torch.float32
    other = read_config(llama_file(tmp_path))
    assert (other.eos_token_ids, other.bos_token_id) == ((), None)
    assert other.dtype == torch.bfloat16


def test_ends_are_known_by_their_names_too(tmp_path):
    """Files of Llama 3 Instruct say <|end_of_text|>, and turns end otherwise (llama.cpp#6772)."""
    model = make_model(LlamaConfig)
    tokens = [f"{i}" for i in range(model.config.vocab_size)]
    tokens[3:7] = ["<|end_of_text|>", "<|eot_id|>", "<|start|>", "<|eom_id|>"]
    metadata = [("tokenizer.ggml.eos_token_id", "add_uint32", 3)]
    path = convert(model, tmp_path / "model.gguf", metadata=metadata, tokens=tokens)
    assert read_config(path).eos_token_ids == (3, 4, 6)


def test_a_directory_with_one_file_is_that_file(tmp_path):
    path = llama_file(tmp_path)
    assert read_config(tmp_path) == read_config(path) == read_config(path, load_format="gguf")
    convert(make_model(LlamaConfig), tmp_path / "second.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF models"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (("llama.attention.sliding_window", "add_uint32", 16), "attention.sliding_window=16"),
        (("llama.expert_group_count", "add_uint32", 8), "expert_group_count=8"),
        (("llama.attention.causal", "add_bool", False), "attention.causal=False"),
        (("llama.rope.scaling.attn_factor", "add_float32", 2.0), "attn_factor=2.0"),
        (("llama.rope.dimension_count", "add_uint32", 16), "dimension_count=16 differs"),
        (("llama.attention.value_length", "add_uint32", 16), "value_length=16 differs"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, metadata, message):
    path = llama_file(tmp_path, metadata=[metadata])
    with pytest.raises(UnsupportedError, match=message):
        read_config(path)


def test_length_dependent_scaling_is_refused(tmp_path):
    metadata = [
        ("llama.rope.scaling.type", "add_string", "longrope"),
        ("llama.rope.scaling.factor", "add_float32", 2.0),
    ]
    with pytest.raises(UnsupportedError, match="'longrope'"):
        load(llama_file(tmp_path, metadata=metadata))


def test_divisors_together_with_scaling_are_refused(tmp_path):
    metadata = [("llama.rope.scaling.type", "add_string", "yarn")]
    extra = [("rope_freqs.weight", np.ones(16, np.float32))]
    path = llama_file(tmp_path, metadata=metadata, extra_tensors=extra)
    with pytest.raises(UnsupportedError, match=r"both rope_freqs\.weight and rope scaling 'yarn'"):
        read_config(path)


def test_unknown_architecture_lists_the_known(tmp_path):
    other = {"general.architecture": ("mamba", gguf.GGUFValueType.STRING)}
    path = changed(llama_file(tmp_path), other)
    with pytest.raises(UnsupportedError, match=r"'mamba'\. Known: llama, .*qwen3, .*qwen3moe, "):
        read_config(path)


GATES = "blk.1.ffn_gate_exps.weight"


@pytest.mark.parametrize(
    ("arch", "metadata", "tensors", "error", "message"),
    [
        ("qwen3moe", {"expert_count": None}, {}, CheckpointError, "expert_count=None is not a pos"),
        ("qwen3moe", {"expert_count": 7}, {}, CheckpointError, r"gate\.weight .* shape \[6, 32\]"),
        ("qwen3moe", {"expert_gating_func": 2}, {}, UnsupportedError, "gating_func=2 is not supp"),
        ("qwen3moe", {}, {GATES: None}, CheckpointError, r"lacks .*1\.mlp\.experts\.0\.gate_proj"),
        ("qwen3moe", {}, {GATES: (5, 16, 32)}, CheckpointError, r"lacks .*experts\.5\.gate_proj"),
        ("qwen3moe", {}, {GATES: (6, 8, 32)}, CheckpointError, r"gate_proj.* has shape \[8, 32\]"),
        ("qwen3moe", {}, {GATES: (16,)}, CheckpointError, r"shape \[16\], which is no stack"),
        ("qwen3moe", {}, {GATES: (4097, 1)}, CheckpointError, r"\[4097, 1\], which is no stack"),
        ("gpt-oss", {"attention.sliding_window": None}, {}, CheckpointError, "window=None is not"),
        ("gemma3", {"attention.sliding_window_pattern": 0}, {}, UnsupportedError, "pattern=0 is"),
        ("phi3", {}, {"rope_factors_long.weight": None}, CheckpointError, "long.weight is missing"),
        ("granite", {"rope.scaling.finetuned": False}, {}, UnsupportedError, "finetuned=False"),
        ("glm4moe", {"nextn_predict_layers": 4}, {}, CheckpointError, "num_hidden_layers=0 is not"),
    ],
)
def test_spoilt_files_of_families_are_refused_by_name(
    tmp_path, arch, metadata, tensors, error, message
):
    _, path = write_family_gguf(tmp_path / "model", arch)
    keys = {
        f"{arch}.{key}": (value, *(BOOL if value is False else UINT32))
        for key, value in metadata.items()
    }
    others = {
        name: None if shape is None else np.ones(shape, np.float32)
        for name, shape in tensors.items()
    }
    with pytest.raises(error, match=message):
        load(changed(path, keys, others))


def test_older_files_have_the_heads_of_latent_attention_whole(tmp_path):
    """Before llama.cpp#12801: sizes of heads, and ``kv_b_proj`` as it is."""
    directory, path = write_family_gguf(tmp_path / "model", "deepseek2")
    lengths = {"key_length": 20, "value_length": 16, "key_length_mla": None}
    keys = {f"deepseek2.attention.{key}": (value, *UINT32) for key, value in lengths.items()}
    stored, tensors = load_file(directory / "model.safetensors"), {}
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        tensors |= {f"blk.{layer}.attn_{one}_b.weight": None for one in "kv"}
        tensors[f"blk.{layer}.attn_kv_b.weight"] = stored[name].numpy()
    found, wanted = (load(each) for each in (changed(path, keys, tensors), directory))
    assert torch.equal(*(Bench(model).logits(PROMPT, []) for model in (found, wanted)))


def test_mistral_small_has_ministral_s_name_in_files(tmp_path):
    _, path = write_family_gguf(tmp_path / "model", "mistral3")
    keys = ("attention.temperature_scale", "rope.scaling.type", "rope.scaling.factor")
    config = read_config(changed(path, {f"mistral3.{key}": (None, *UINT32) for key in keys}))
    assert (config.architecture, config.rope["rope_type"]) == ("MistralForCausalLM", "default")
    assert config.extra["sliding_window"] is None


def test_a_gemma_without_windows_sees_all(tmp_path):
    _, path = write_family_gguf(tmp_path / "model", "gemma3")
    config = read_config(changed(path, {"gemma3.attention.sliding_window": (None, *UINT32)}))
    assert set(config.extra["layer_types"]) == {"full_attention"}


def test_a_turn_of_gemma_ends_by_its_token_s_name(tmp_path):
    tokens = [str(i) for i in range(63)] + ["<end_of_turn>"]
    _, path = write_family_gguf(tmp_path / "model", "gemma3", tokens=tokens)
    assert read_config(path).eos_token_ids == (63,)


def test_missing_key_and_tensor_are_named(tmp_path):
    empty = tmp_path / "empty.gguf"
    written(GGUFWriter(empty, "llama"), empty)
    with pytest.raises(CheckpointError, match=r"llama\.embedding_length=None"):
        read_config(empty)
    model = make_model(LlamaConfig)
    del model.model.layers[1].mlp.up_proj
    path = convert(model, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"lacks .*layers\.1\.mlp\.up_proj\.weight"):
        load(path)


def test_tensors_without_a_use_are_refused(tmp_path):
    extra = [("blk.0.attn_sinks.weight", np.zeros(4, np.float32))]
    with pytest.raises(UnsupportedError, match=r"does not use: blk\.0\.attn_sinks\.weight"):
        load(llama_file(tmp_path, extra_tensors=extra))


def test_tensors_of_integers_are_refused(tmp_path):
    raw = {"blk.1.ffn_down.weight": (np.zeros((64, 96), np.int8), GGMLQuantizationType.I8)}
    other = changed(llama_file(tmp_path), tensors=raw)
    with pytest.raises(UnsupportedError, match=r"blk\.1\.ffn_down\.weight .* has type I8"):
        load(other)


def test_nan_is_named(tmp_path):
    model = make_model(LlamaConfig)
    model.model.layers[1].mlp.down_proj.weight.data[5, 5] = float("nan")
    path = convert(model, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight .* NaN"):
        load(path)


def test_truncated_file(tmp_path):
    path = llama_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-40_000])
    with pytest.raises(CheckpointError, match="ends before the data of tensor"):
        load(path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    path = tmp_path_factory.mktemp("intact") / "model.gguf"
    return convert(make_model(LlamaConfig, num_hidden_layers=1), path).read_bytes()


@settings(FIXED, max_examples=200)
@given(
    damage=st.lists(st.tuples(st.integers(0, 2200), st.integers(0, 255)), min_size=1, max_size=3)
)
def test_damaged_headers_load_or_raise_typed_errors(intact, tmp_path, damage):
    data = bytearray(intact)
    for place, value in damage:
        data[place] = value
    (tmp_path / "damaged.gguf").write_bytes(data)
    with contextlib.suppress(CheckpointError, UnsupportedError):
        load(tmp_path / "damaged.gguf")

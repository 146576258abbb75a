"""Loading Hugging Face directories: what works, and every way in which it fails."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from helpers.checkpoints import change_config, change_tensors
from helpers.forward import Bench, load
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.load import sources

transformers_logging.disable_progress_bar()
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def saved(directory, *, max_shard_size="1GB", **options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def checkpoint(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "copy")


def require_same_logits(*directories):
    assert torch.equal(*(Bench(load(directory)).logits(PROMPT, []) for directory in directories))


def test_sharded_and_single_files_are_the_same_model(pristine, tmp_path):
    sharded = saved(tmp_path, max_shard_size="8KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    require_same_logits(pristine, sharded)


def test_copies_of_the_weights_in_other_files_are_left_alone(pristine, checkpoint):
    save_file({"layers.0.wq.weight": torch.zeros(3)}, checkpoint / "consolidated.safetensors")
    require_same_logits(pristine, checkpoint)


def test_weights_under_another_file_name(pristine, checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    require_same_logits(pristine, checkpoint)


def test_reading_in_small_chunks_changes_nothing(pristine, monkeypatch):
    expected = Bench(load(pristine)).logits(PROMPT, [])
    monkeypatch.setattr(sources, "CHUNK_ELEMENTS", 70)
    assert torch.equal(Bench(load(pristine)).logits(PROMPT, []), expected)


def test_fused_rows_keep_their_order(pristine):
    tensors = load_file(pristine / "model.safetensors")
    prefix = "model.layers.1.self_attn"
    expected = torch.cat([tensors[f"{prefix}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(load(pristine).layers[1].attention.qkv.weight.matrix, expected)


def test_tied_embeddings_share_one_weight(tmp_path):
    model = load(saved(tmp_path, tie_word_embeddings=True))
    assert model.head is model.embedding
    untied = load(saved(tmp_path, tie_word_embeddings=False))
    assert untied.head is not untied.embedding
    assert untied.weights_bytes == model.weights_bytes + 48 * 32 * 4


def test_weights_bytes_counts_every_matrix(pristine):
    tensors = load_file(pristine / "model.safetensors")
    assert load(pristine).weights_bytes == sum(
        tensor.nbytes for tensor in tensors.values() if tensor.dim() == 2
    )


def test_a_tied_head_that_differs_is_refused(checkpoint):
    change_config(checkpoint, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load(checkpoint)

    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(checkpoint, lambda tensors: tensors | {"lm_head.weight": embedding})
    model = load(checkpoint)
    assert model.head is model.embedding


def test_a_head_neither_stored_nor_tied_is_refused_with_both_remedies(checkpoint):
    change_tensors(
        checkpoint,
        lambda tensors: {name: tensors[name] for name in tensors.keys() - {"lm_head.weight"}},
    )
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head.*not tie") as caught:
        load(checkpoint)
    assert "set tie_word_embeddings to true" in caught.value.remedy
    load(checkpoint, load_format="dummy")
    change_config(checkpoint, tie_word_embeddings=True)
    load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_files_of_other_floating_dtypes_are_converted(checkpoint, dtype):
    change_tensors(
        checkpoint, lambda tensors: {name: one.to(dtype) for name, one in tensors.items()}
    )
    model = load(checkpoint, dtype=torch.bfloat16)
    expected = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.embedding.matrix, expected.to(torch.bfloat16))
    assert {cache.dtype for cache in model.caches} == {torch.bfloat16}


def test_derived_rotary_tensors_of_old_files_are_not_used(pristine, checkpoint):
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change_tensors(checkpoint, lambda tensors: tensors | derived)
    require_same_logits(pristine, checkpoint)


def test_missing_path(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "nowhere")


def test_unexpected_shape_names_tensor_found_and_wanted(checkpoint):
    change_config(checkpoint, num_key_value_heads=4)
    wanted = r"k_proj\.weight .* has shape \[16, 32\], the config expects \[32, 32\]"
    with pytest.raises(CheckpointError, match=wanted):
        load(checkpoint)


def test_tensors_without_a_use_are_refused(tmp_path):
    directory = saved(tmp_path, attention_bias=True)
    change_config(directory, attention_bias=False)
    with pytest.raises(UnsupportedError, match=r"8 tensors .* does not use: .*bias.*, \.\.\."):
        load(directory)


@pytest.mark.parametrize("size", [0, 5, 100, 5000])
def test_truncated_safetensors(checkpoint, size):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt"):
        load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_dtypes_that_cannot_be_converted(checkpoint, dtype):
    change_tensors(checkpoint, lambda tensors: tensors | {K_PROJ: tensors[K_PROJ].to(dtype)})
    with pytest.raises(UnsupportedError, match=rf"{K_PROJ} .* has dtype"):
        load(checkpoint)


def test_missing_shard_is_named(tmp_path):
    directory = saved(tmp_path, max_shard_size="8KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lists {shard.name}, which is not there"):
        load(directory)


def test_an_index_beside_a_single_file_counts_if_it_names_it(checkpoint):
    whole = Bench(load(checkpoint)).logits(PROMPT, [])
    stored = load_file(checkpoint / "model.safetensors")
    save_file({K_PROJ: stored.pop(K_PROJ)}, checkpoint / "model_extra_tensors.safetensors")
    save_file(stored, checkpoint / "model.safetensors")
    index = checkpoint / "model.safetensors.index.json"
    files = dict.fromkeys(stored, "model.safetensors") | {K_PROJ: "model_extra_tensors.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    assert torch.equal(Bench(load(checkpoint)).logits(PROMPT, []), whole)
    # One that is left over from shards.
    save_file(stored | load_file(checkpoint / files[K_PROJ]), checkpoint / "model.safetensors")
    index.write_text(json.dumps({"weight_map": {K_PROJ: "model-00001-of-00002.safetensors"}}))
    assert torch.equal(Bench(load(checkpoint)).logits(PROMPT, []), whole)


def test_index_without_a_weight_map(tmp_path):
    directory = saved(tmp_path, max_shard_size="8KB")
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(directory)


def test_pickled_files_of_other_things_are_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        load(checkpoint)
    (checkpoint / "training_args.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"none is pytorch_model\.bin \(training_args\.bin"):
        load(checkpoint)


@pytest.mark.parametrize("name", [K_PROJ, "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(checkpoint, name, value):
    def spoil(tensors):
        tensors[name].view(-1)[7] = value
        return tensors

    change_tensors(checkpoint, spoil)
    with pytest.raises(CheckpointError, match=f"{name} .* NaN or infinite"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_quantization_that_only_another_file_tells_is_refused(checkpoint, name):
    (checkpoint / name).write_text("{}")
    with pytest.raises(UnsupportedError, match=rf"{name} says how the weights are quantized"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"is_causal": False}, "is_causal=false"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"sliding_window": 16, "use_sliding_window": True}, "sliding_window=16"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_unsupported_arithmetic_is_refused_by_name(checkpoint, changes, message):
    change_config(checkpoint, **changes)
    with pytest.raises(UnsupportedError, match=message):
        load(checkpoint)


WINDOWED = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("Mistral", {"sliding_window": 0}, CheckpointError, "sliding_window=0"),
        ("Mistral", {"sliding_window": "16"}, CheckpointError, "sliding_window='16'"),
        ("Mistral", {"layer_types": ["sliding_attention"] * 9}, CheckpointError, "9 layer_types"),
        ("Qwen3", WINDOWED | {"max_window_layers": -1}, CheckpointError, "max_window_layers=-1"),
        (
            "Qwen3",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
            UnsupportedError,
            "layer_types=",
        ),
    ],
)
def test_impossible_windows_are_refused_by_name(family, changes, error, message, checkpoint):
    change_config(checkpoint, architectures=[f"{family}ForCausalLM"], **changes)
    with pytest.raises(error, match=message):
        load(checkpoint)


@pytest.mark.parametrize("options", [{"max_positions": 0}, {"load_format": "onnx"}])
def test_impossible_arguments(pristine, options):
    with pytest.raises(ConfigError):
        load(pristine, **options)


def test_load_format_must_fit_the_path(pristine):
    with pytest.raises(CheckpointError, match="holds 0 GGUF models"):
        load(pristine, load_format="gguf")
    with pytest.raises(ConfigError, match="needs a directory"):
        load(pristine / "model.safetensors", load_format="safetensors")

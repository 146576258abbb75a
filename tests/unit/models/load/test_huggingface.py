"""config.json in the forms that checkpoints have it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.decoder import sliding_windows
from sametoken.models.loader import read_config
from sametoken.models.registry import ARCHITECTURES

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def read(directory, config, generation_config=None):
    (directory / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return read_config(directory)


def test_absent_keys_take_the_values_transformers_implies(tmp_path):
    config = read(tmp_path, BASE)
    theirs = LlamaConfig(**{key: value for key, value in BASE.items() if key != "architectures"})
    assert config.num_kv_heads == theirs.num_key_value_heads == 4
    assert config.head_dim == theirs.head_dim == 16
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope == theirs.rope_parameters
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.dtype == torch.float32


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12},
        {
            "architectures": ["NemotronHForCausalLM"],
            "hybrid_override_pattern": "M-M*",
            "head_dim": 0,
        },
        {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"full_attention": {}}},
        {"architectures": ["OPTForCausalLM"], "quantization_config": {"bits": 4}},
    ],
    ids=lambda config: config["architectures"][0],
)
def test_other_architectures_are_refused_by_name_before_any_key_is_read(tmp_path, config):
    with pytest.raises(UnsupportedError) as caught:
        read(tmp_path, config)
    assert caught.value.cause == f"architecture {config['architectures'][0]!r} is not supported"
    assert caught.value.remedy == f"supported: {', '.join(ARCHITECTURES)}"


@pytest.mark.parametrize("config_class", [MistralConfig, Qwen3Config])
def test_values_implied_by_one_architecture(tmp_path, config_class):
    name = config_class.__name__.replace("Config", "ForCausalLM")
    sizes = BASE | {"architectures": [name], "num_attention_heads": 32, "hidden_size": 128}
    config = read(tmp_path, sizes)
    theirs = config_class(**{key: value for key, value in sizes.items() if key != "architectures"})
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    # Qwen3 implies a window too, but also that it is not used.
    assert sliding_windows(config, "") == [theirs.sliding_window] * theirs.num_hidden_layers


def test_layers_have_the_windows_that_transformers_gives_them(tmp_path):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
    sizes = BASE | {"architectures": ["Qwen3ForCausalLM"]} | heads
    for changes in (
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True},
        {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ):
        config = read(tmp_path, sizes | changes)
        theirs = Qwen3Config(
            **{key: sizes[key] for key in sizes if key != "architectures"}, **changes
        )
        windows = [
            theirs.sliding_window if kind == "sliding_attention" else None
            for kind in theirs.layer_types
        ]
        assert sliding_windows(config, "") == windows


def test_old_and_new_rope_settings_mean_the_same(tmp_path):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    new = BASE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}}
    old = BASE | {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}}
    found = [read(tmp_path, config).rope for config in (new, old)]
    for rope in found:
        rope.pop("type", None)
    assert found[0] == found[1] == {"rope_type": "yarn", "rope_theta": 5e5, **scaling}


def test_rope_lengths_are_filled_in(tmp_path):
    rope = read(tmp_path, BASE | {"rope_scaling": {"rope_type": "yarn", "factor": None}}).rope
    assert rope["original_max_position_embeddings"] == 512
    assert rope["factor"] == 1.0
    outer = {"original_max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn"}}
    assert read(tmp_path, BASE | outer).rope["factor"] == 2.0


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "factor": 2.5}, 1280),
        ({"rope_type": "linear", "factor": 3}, 1536),
        ({"rope_type": "linear", "factor": float("nan")}, 512),
        ({"rope_type": "linear", "factor": 0.5}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "default", "factor": 4.0}, 512),
    ],
)
def test_scaled_positions_count(tmp_path, rope, positions):
    assert read(tmp_path, BASE | {"rope_parameters": rope}).max_position_embeddings == positions


def test_end_ids_come_from_the_generation_config_first(tmp_path):
    config = BASE | {"eos_token_id": 7, "bos_token_id": 1}
    assert read(tmp_path, config).eos_token_ids == (7,)
    assert read(tmp_path, config, {"eos_token_id": None}).eos_token_ids == (7,)
    found = read(tmp_path, config, {"eos_token_id": [8, 9]})
    assert (found.eos_token_ids, found.bos_token_id) == ((8, 9), 1)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, BASE).eos_token_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_by_either_name(tmp_path, key):
    assert read(tmp_path, BASE | {key: "bfloat16"}).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope settings per layer type \('full_attention'\), which are not supported",
        ),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, change, message):
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, BASE | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": "100"}, "vocab_size='100'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        ({"num_key_value_heads": 3}, "4 heads of size 16 over 3"),
        ({"head_dim": 7}, "of size 7"),
        ({"head_dim": 2**30}, "head_dim=1073741824"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"architectures": []}, "no architecture"),
        ({"rope_scaling": "yarn"}, "not an object"),
    ],
)
def test_impossible_settings_are_named(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, BASE | change)


def test_a_nested_text_config(tmp_path):
    """A model that also sees says dtype and tying once, for itself and its text decoder."""
    text = {key: value for key, value in BASE.items() if key != "architectures"}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text | {"tie_word_embeddings": False, "eos_token_id": 9},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "vision_config": {"hidden_size": 3},
    }
    found = read(tmp_path, config)
    assert found.architecture == "Qwen3_5ForConditionalGeneration"
    assert found.hidden_size == BASE["hidden_size"]
    assert (found.tie_word_embeddings, found.dtype) == (True, torch.bfloat16)
    assert found.eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, 0.25),
        ({"partial_rotary_factor": 0.5}, 0.5),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.125}, "partial_rotary_factor": 0.5},
            0.125,
        ),
    ],
)
def test_hybrids_rotate_a_part_of_a_head(tmp_path, given, wanted):
    config = BASE | {"architectures": ["Qwen3NextForCausalLM"]} | given
    assert read(tmp_path, config).rope["partial_rotary_factor"] == wanted


def test_absent_or_malformed_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_config(tmp_path)

"""Nemotron-H's configs and tensors: what is read, implied, refused and declared."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import NemotronHConfig

from helpers.checkpoints import write_checkpoint
from helpers.forward import Bench, load, require_logits_by_kernels
from helpers.nemotron import nemotron_config, nemotron_tensors, write_nemotron
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.loader import read_config
from sametoken.models.nemotron_h import NemotronHForCausalLM
from sametoken.ops.cache_types import PagedKV, Recurrent, Stateless
from sametoken.ops.model.mamba2.rule import Mamba2


def read(directory, **changes):
    (directory / "config.json").write_text(json.dumps(nemotron_config(**changes)))
    return read_config(directory)


def test_each_layer_declares_what_it_keeps(tmp_path):
    model = load(write_nemotron(tmp_path, pattern="M*E-"))
    mamba, attention, experts, mlp = model.caches
    assert mamba == Recurrent(Mamba2(4, 6, 2, 5, 4), torch.float32)
    assert attention == PagedKV(1, 8, 8, torch.float32)
    assert experts == mlp == Stateless()
    assert Bench(model).kv.layers[2] is None


def test_absent_keys_take_the_values_transformers_implies(tmp_path):
    theirs = NemotronHConfig()
    config = nemotron_config(num_attention_heads=16)
    for key in NemotronHForCausalLM.implied:
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    for key, value in NemotronHForCausalLM.implied.items():
        assert getattr(theirs, key) == value
        assert found.extra[key] == value
    assert (found.num_kv_heads, found.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert found.rms_norm_eps == theirs.layer_norm_epsilon


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_block_type": ["mamba", "attention"]},
        {"layers_block_type": ["linear_attention", "full_attention"], "num_hidden_layers": 9},
        {"layer_types": ["mamba", "full_attention"]},
        {"hybrid_override_pattern": "M*"},
        {"block_configs": [{"block_type": "mamba"}, {"block_type": "attention"}]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_layers_by_any_of_their_keys(tmp_path, changes):
    config = read(tmp_path, **changes)
    assert config.num_layers == 2
    assert config.extra["layer_types"] == ["linear_attention", "full_attention"]


def test_older_names_of_keys_win_as_in_transformers(tmp_path):
    changes = {"mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_conv_bias": False}
    config = read(tmp_path, **changes)
    theirs = NemotronHConfig(**nemotron_config(**changes))
    for key in ("n_groups", "conv_kernel", "use_conv_bias"):
        assert config.extra[key] == getattr(theirs, key)


def test_memory_is_planned_by_the_largest_of_puzzle_s_experts(tmp_path):
    sizes = [{"moe_intermediate_size": 8, "num_experts_per_tok": 2}, {"moe_intermediate_size": 24}]
    blocks = [{"block_type": "moe", **each} for each in sizes]
    given = nemotron_config(block_configs=[*blocks, {"block_type": "mamba"}])
    del given["moe_intermediate_size"], given["num_experts_per_tok"], given["intermediate_size"]
    blocks[1]["num_experts_per_tok"] = 1
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = read_config(tmp_path)
    assert found.intermediate_size == found.extra["moe_intermediate_size"] == 24
    assert found.extra["num_experts_per_tok"] == 2
    assert NemotronHForCausalLM.divided_sizes(found)["moe_intermediate_size"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M*|"}, r"layer_types=.*'\|'"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"time_step_limit": [0.0, 0.5]}, r"time_step_limit=\[0.0, 0.5\]"),
        ({"mamba_dt_limit": [0.001, math.inf]}, r"time_step_limit=\[0.001, inf\]"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"sliding_window": 8}, "sliding_window=8"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        load(written(tmp_path, changes))


def written(directory, changes):
    """Tensors of a supported pattern beside a config with another."""
    config = nemotron_config("M*E")
    return write_checkpoint(directory, config | changes, nemotron_tensors(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": ""}, "names no layers"),
        ({"hybrid_override_pattern": 5}, "is no text"),
        ({"block_configs": [3]}, "no list of objects"),
        ({"mamba_num_heads": 5}, "5 Mamba-2 heads in 2 groups"),
        ({"mamba_head_dim": 2**30}, "mamba_head_dim"),
        ({"n_group": 3}, "of 4 experts in 1 of n_group=3 groups"),
        ({"n_group": 4, "num_experts_per_tok": 2}, "2 of 4 experts in 1 of n_group=4 groups"),
        ({"n_routed_experts": 10**9}, "n_routed_experts"),
    ],
)
def test_impossible_configs_are_refused_by_key(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(written(tmp_path, changes))


def test_the_module_s_tensors_are_passed_over_and_unknown_ones_are_refused(tmp_path):
    config = nemotron_config("M*")
    tensors = nemotron_tensors(config)
    load(write_checkpoint(tmp_path / "a", config, tensors))
    # As transformers 5.3 to 5.15 saves it (transformers#48075).
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    load(write_checkpoint(tmp_path / "singular", config, tensors))
    surprise = tensors | {"backbone.layers.0.surprise": torch.zeros(3)}
    with pytest.raises(UnsupportedError, match="surprise"):
        load(write_checkpoint(tmp_path / "b", config, surprise))


def test_experts_in_one_tensor_each_are_the_same(tmp_path):
    config = nemotron_config("*E", moe_latent_size=6)
    tensors = nemotron_tensors(config)
    merged = {name: t for name, t in tensors.items() if "layers.1.mixer.experts." not in name}
    prefix = "backbone.layers.1.mixer.experts"
    for kind in ("up_proj", "down_proj"):
        stack = [tensors[f"{prefix}.{i}.{kind}.weight"] for i in range(4)]
        merged[f"{prefix}.{kind}"] = torch.stack(stack)
    one, other = (
        load(write_checkpoint(tmp_path / name, config, each))
        for name, each in (("a", tensors), ("b", merged))
    )
    prompt = [1, 5, 3, 2, 7]
    assert torch.equal(Bench(one).logits(prompt, []), Bench(other).logits(prompt, [2]))


def test_the_triton_kernels_run_every_layer(tmp_path):
    path = write_nemotron(tmp_path, pattern="M*E-", moe_latent_size=6)
    require_logits_by_kernels(path, [1, 5, 3, 2, 7, 7], [1, 4])

"""Configs of hybrids of Mamba-2: what is read, refused and declared."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.checkpoints import change_config, read_checkpoint, write_checkpoint
from helpers.families import SIZES, fixed_config, write_family
from helpers.forward import Bench, load
from helpers.nemotron import write_nemotron
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.load.settings import Settings
from sametoken.models.loader import read_config
from sametoken.models.mamba2 import time_step_limit
from sametoken.models.registry import model_class, require_divisible
from sametoken.ops.cache_types import PagedKV, Recurrent
from sametoken.ops.model.mamba2.rule import Mamba2

#: Keys and values of Granite-4.0-H-350M, over small sizes.
GRANITE = SIZES | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "mamba", "attention"],
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "num_experts_per_tok": 0,
    "num_local_experts": 0,
    "position_embedding_type": "nope",
    "shared_intermediate_size": 80,
}
BAMBA = SIZES | {
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [2],
    "attn_rotary_emb": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
}
#: Falcon-H1-0.5B's, likewise.
FALCON = SIZES | {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "key_multiplier": 0.390625,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
}
FAMILIES = {
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "BambaForCausalLM": "bamba",
    "FalconH1ForCausalLM": "falcon_h1",
}
MAMBA = Recurrent(Mamba2(4, 16, 1, 8, 4), torch.float32)
KV = PagedKV(2, 8, 8, torch.float32)


def read(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def declared(directory, config):
    """Its caches, which are known without weights."""
    found = read(directory, config)
    return model_class(found.architecture).caches_of(found, torch.float32, "")


@pytest.mark.parametrize(
    ("config", "caches"),
    [
        (GRANITE, (MAMBA, MAMBA, KV)),
        (
            {key: value for key, value in GRANITE.items() if key != "layer_types"}
            | {"layers_block_type": ["full_attention", "linear_attention", "full_attention"]},
            (KV, MAMBA, KV),
        ),
        (BAMBA, (MAMBA, MAMBA, KV)),
        (FALCON, (KV, KV, KV, MAMBA, MAMBA, MAMBA)),
    ],
    ids=["granite", "other key", "bamba", "falcon"],
)
def test_layers_as_published_configs_name_them(tmp_path, config, caches):
    assert declared(tmp_path, config) == caches
    assert load(tmp_path, load_format="dummy").caches == caches


def test_memory_is_planned_by_the_mlps_that_there_are(tmp_path):
    dense = read(tmp_path, GRANITE)
    assert (dense.intermediate_size, dense.extra["num_experts_per_tok"]) == (80, None)
    mixed = read(tmp_path, GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2})
    assert (mixed.intermediate_size, mixed.extra["moe_intermediate_size"]) == (80, 48)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (GRANITE | {"layer_types": ["mamba"]}, CheckpointError, "does not name 3 layers"),
        (GRANITE | {"mamba_d_head": 12}, CheckpointError, "mamba_n_heads=4 of mamba_d_head=12"),
        (GRANITE | {"mamba_n_groups": 3}, CheckpointError, "4 Mamba-2 heads in 3 groups"),
        (GRANITE | {"shared_intermediate_size": 0}, CheckpointError, "shared_intermediate_size=0"),
        (GRANITE | {"layer_types": ["mlp"] * 3}, UnsupportedError, "layer_types=.*mlp"),
        (GRANITE | {"hidden_act": "gelu"}, UnsupportedError, "hidden_act='gelu'"),
        (BAMBA | {"attn_layer_indices": "all"}, CheckpointError, "attn_layer_indices='all'"),
        (BAMBA | {"attn_rotary_emb": 8}, UnsupportedError, "attn_rotary_emb=8"),
        (BAMBA | {"mlp_bias": True}, UnsupportedError, "mlp_bias=true"),
        (FALCON | {"mamba_d_ssm": 60}, CheckpointError, "have the 60 features"),
        (FALCON | {"mlp_multipliers": [1.0]}, CheckpointError, r"mlp_multipliers=\[1.0\]"),
        (FALCON | {"ssm_multipliers": ["1"] * 5}, CheckpointError, "ssm_multipliers="),
        (
            FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            UnsupportedError,
            "mamba_norm_before_gate=True",
        ),
    ],
)
def test_other_configs_are_refused_by_key(tmp_path, config, error, message):
    (architecture,) = config["architectures"]
    write_family(tmp_path, FAMILIES[architecture])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (GRANITE, "logits_scaling", "16"),
        (GRANITE, "embedding_multiplier", [12]),
        (GRANITE, "residual_multiplier", 0),
        (GRANITE, "num_local_experts", "8"),
        (GRANITE | {"num_local_experts": 8}, "num_experts_per_tok", 0),
        (BAMBA, "time_step_limit", 3),
        (BAMBA, "attn_layer_indices", [2] * 4),
        (FALCON, "time_step_limit", [1, 0]),
        (FALCON, "key_multiplier", 1e39),
        (FALCON, "ssm_multipliers", [1e39] * 5),
    ],
)
def test_other_values_are_refused_before_weights_are_read(tmp_path, config, key, value):
    with pytest.raises(CheckpointError, match=f"{key}="):
        declared(tmp_path, config | {key: value})


@pytest.mark.parametrize("name", ["granite_hybrid", "bamba", "nemotron"])
def test_keys_of_falcon_mean_nothing_to_other_families(tmp_path, name):
    write = write_nemotron if name == "nemotron" else partial(write_family, family=name)
    load(change_config(write(tmp_path), mamba_rms_norm=False, projectors_bias=True))


@pytest.mark.parametrize("config", [GRANITE, BAMBA, FALCON])
def test_ranks_divide_groups_or_share_them(tmp_path, config):
    for groups in (1, 2, 4):
        require_divisible(read(tmp_path, config | {"mamba_n_groups": groups}), 4)
    with pytest.raises(ConfigError, match="mamba_n_heads=1 is no multiple of 2"):
        require_divisible(read(tmp_path, config | {"mamba_n_heads": 1, "mamba_d_head": 64}), 2)
    with pytest.raises(ConfigError, match="mamba_n_groups=3 is no multiple and no divisor of 2"):
        require_divisible(read(tmp_path, config | {"mamba_n_groups": 3}), 2)


@pytest.mark.parametrize(("size", "groups", "ranks"), [(2, 2, 1), (4, 1, 1), (8, 1, 2)])
def test_a_rank_s_rule_has_whole_groups(size, groups, ranks):
    assert Mamba2(16, 4, 4, 8, 3).divided(size) == Mamba2(16 // size, 4, groups, 8, 3, ranks)


def test_granite_s_experts_as_a_trainer_has_them_in_memory(tmp_path):
    stored = load(write_family(tmp_path / "stored", "granite_hybrid"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", trust_remote_code=False)
    config, _ = read_checkpoint(tmp_path / "stored")
    write_checkpoint(tmp_path / "sent", config, theirs.state_dict())
    prompt = [1, 5, 3, 2, 7]
    sent = Bench(load(tmp_path / "sent")).logits(prompt, [])
    assert torch.equal(sent, Bench(stored).logits(prompt, []))


def test_ranks_divide_the_sizes_of_layers_that_there_are(tmp_path):
    dense = fixed_config("granite_hybrid", layer_types=["full_attention"] * 3, num_local_experts=0)
    found = read(tmp_path, dense.to_dict() | {"architectures": GRANITE["architectures"]})
    assert model_class(found.architecture).divided_sizes(found) == {
        "num_attention_heads": 4,
        "shared_intermediate_size": 24,
    }
    assert model_class(found.architecture).shared_sizes(found) == {"num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    recurrent = read(tmp_path, GRANITE | experts | {"layer_types": ["mamba"] * 3})
    assert model_class(found.architecture).divided_sizes(recurrent) == {
        "mamba_n_heads": 4,
        "shared_intermediate_size": 80,
        "intermediate_size": 48,
    }
    assert model_class(found.architecture).shared_sizes(recurrent) == {"mamba_n_groups": 1}


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.001, {"__float__": "Infinity"}], (0.001, math.inf)),
        ([0, 3], (0.0, 3.0)),
    ],
)
def test_limits_of_time_steps_as_configs_write_them(given, limit):
    assert time_step_limit(Settings({"time_step_limit": given}, "")) == limit


@pytest.mark.parametrize(
    "given", [[0.0], [3, 1], "all", [0.0, None], [math.nan, 1.0], [0, 10**400], [{}, 1], 3]
)
def test_other_limits_of_time_steps_are_refused(given):
    with pytest.raises(CheckpointError, match="time_step_limit"):
        time_step_limit(Settings({"time_step_limit": given}, ""))

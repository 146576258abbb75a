"""Rotary tables against transformers' own, and the refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.rotary import DRAFT_POSITIONS, rotary_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def table(rope, head_dim=16, max_positions=200):
    return rotary_table(
        {"rope_theta": 1000.0, **rope},
        head_dim=head_dim,
        max_positions=max_positions,
        device=torch.device("cpu"),
    )


def theirs_of(rope, head_dim=16, max_position_embeddings=256) -> LlamaRotaryEmbedding:
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim}
    sizes |= {"max_position_embeddings": max_position_embeddings}
    return LlamaRotaryEmbedding(
        LlamaConfig(**sizes, rope_parameters={"rope_theta": 1000.0, **rope})
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 0.7,
            "beta_fast": 16,
            "beta_slow": 2,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_equals_transformers(rope):
    positions = torch.arange(200)[None]
    cos, sin = theirs_of(rope)(torch.zeros(1), positions)
    ours = table(rope)
    assert ours.cos.dtype == torch.float32
    assert torch.equal(ours.cos, cos[0, :, :8])
    assert torch.equal(ours.sin, sin[0, :, :8])


def test_the_factor_of_yarn_s_authors_is_beside_the_computed_one():
    """DeepSeek-R1-0528-Qwen3-8B has it, so that both together are 1; transformers warns of it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    unscaled = table(yarn | {"attention_factor": 1.0})
    found = table(yarn | {"attn_factor": 0.8782488562869419})
    torch.testing.assert_close(found.cos, unscaled.cos, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.sin, unscaled.sin, rtol=1e-6, atol=1e-6)
    both = table(yarn | {"attention_factor": 1.0, "attn_factor": 0.5})
    assert torch.equal(both.cos, unscaled.cos)
    assert torch.equal(table(yarn | {"attn_factor": None}).cos, table(yarn).cos)
    with pytest.raises(CheckpointError, match="'yarn' lacks a parameter or has a bad one"):
        table(yarn | {"attn_factor": "much"})


FAR = [
    # Llama 3.1, Qwen3 with YaRN, and YaRN as in DeepSeek-V3.
    {**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
    {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
]


@pytest.mark.parametrize("rope", FAR, ids=["llama3.1", "qwen3-yarn", "deepseek-yarn"])
def test_far_positions_equal_transformers(rope):
    length = 262_144
    theirs = theirs_of(rope, head_dim=128, max_position_embeddings=131_072)
    ours = table(rope, head_dim=128, max_positions=length)
    for first in (0, 32_760, 131_072 - 8, length - 64):
        positions = torch.arange(first, first + 64)[None]
        cos, sin = theirs(torch.zeros(1), positions)
        assert torch.equal(ours.cos[first : first + 64], cos[0, :, :64])
        assert torch.equal(ours.sin[first : first + 64], sin[0, :, :64])


def test_divisors_express_llama3():
    scaled, default = table(LLAMA3), table({"rope_type": "default"})
    # At position 1 the angle is the frequency itself, below pi.
    divisors = torch.atan2(default.sin[1], default.cos[1]) / torch.atan2(
        scaled.sin[1], scaled.cos[1]
    )
    divided = table({"rope_type": "divided", "divisors": tuple(divisors.tolist())})
    assert not torch.allclose(default.cos, scaled.cos, atol=1e-2)
    torch.testing.assert_close(divided.cos, scaled.cos, atol=1e-4, rtol=0)
    torch.testing.assert_close(divided.sin, scaled.sin, atol=1e-4, rtol=0)


def test_length_dependent_types_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"'dynamic'.*running length"):
        table({"rope_type": "dynamic", "factor": 2.0})


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + index / 9 for index in range(6)],
    "long_factor": [2.0 + index for index in range(6)],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
    "factor": 4.0,
}


def test_the_longest_request_chooses_longrope_s_factors():
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters=LONG | {"rope_theta": 1000.0},
    )
    for longest in (64, 65):
        theirs = Phi3RotaryEmbedding(config)
        ours = table(LONG, max_positions=longest + DRAFT_POSITIONS)
        # Of their sequence's length alone their factors depend.
        cos, sin = theirs(torch.zeros(1), torch.arange(longest)[None])
        torch.testing.assert_close(ours.cos[:longest], cos[0, :, :6], atol=1e-6, rtol=0)
        torch.testing.assert_close(ours.sin[:longest], sin[0, :, :6], atol=1e-6, rtol=0)
    short, long = (table(LONG, max_positions=n + DRAFT_POSITIONS) for n in (64, 65))
    assert not torch.allclose(short.cos[:64], long.cos[:64], atol=1e-2)


@pytest.mark.parametrize(
    "changes",
    [{"long_factor": [2.0]}, {"short_factor": [1.0] * 7}, {"long_factor": None}],
    ids=str,
)
def test_longrope_factors_that_do_not_fit_are_refused(changes):
    with pytest.raises(CheckpointError, match="longrope"):
        table(LONG | changes)


def test_unknown_types_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="'spiral' is not supported"):
        table({"rope_type": "spiral"})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0.0},
        {"rope_type": "linear", "factor": "two"},
        {**LLAMA3, "low_freq_factor": None},
        {"rope_type": "divided", "divisors": (1.0, 2.0)},
    ],
)
def test_missing_or_bad_parameters_are_checkpoint_errors(rope):
    with pytest.raises(CheckpointError, match="rope"):
        table(rope)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3])
def test_a_part_of_a_head(rope):
    """A table for a quarter of a head of 64 is that of a whole head of 16."""
    part = table({**rope, "partial_rotary_factor": 0.25}, head_dim=64)
    whole = table(rope, head_dim=16)
    assert torch.equal(part.cos, whole.cos)
    assert torch.equal(part.sin, whole.sin)


@pytest.mark.parametrize("factor", [0.0, 0.2, 1.5])
def test_parts_that_cannot_be_rotated(factor):
    with pytest.raises(CheckpointError, match="rotated in pairs"):
        table({"rope_type": "default", "partial_rotary_factor": factor}, head_dim=16)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3])
@pytest.mark.parametrize("rows", [1, 2, 7, 63, 64, 65, 1000, 4097])
def test_a_shorter_table_is_the_beginning_of_a_longer_one(rope, rows):
    """So that its length, which follows the memory at hand, changes no bit."""
    long, short = table(rope, max_positions=40_000), table(rope, max_positions=rows)
    assert torch.equal(short.cos, long.cos[:rows])
    assert torch.equal(short.sin, long.sin[:rows])

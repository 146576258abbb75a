"""Rotary embedding tables: cos and sin of every position, computed once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as short
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.ops.backend import RotaryTable
from sametoken.types.speculative_methods import MAX_SPECULATIVE_TOKENS

DEFAULT_THETA = 10_000.0
#: Errors that transformers' functions raise for missing or wrong parameters.
_BAD_PARAMETERS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
LONGROPE = "longrope"
#: Rotates a part of a head's pairs, with the frequencies that they have among all (Gemma 4).
PROPORTIONAL = "proportional"
SCALED_TYPES = ("linear", "llama3", "yarn", LONGROPE, PROPORTIONAL)
_SUPPORTED = f"use a checkpoint with rope type default, {', '.join(SCALED_TYPES)}"
_COMPARE = "compare the checkpoint's rope settings with the original's"
#: Positions beyond the longest request that every table has, for drafts, whatever their number.
DRAFT_POSITIONS = MAX_SPECULATIVE_TOKENS + 1


def rotary_table(
    rope: Mapping[str, Any], *, head_dim: int, max_positions: int, device: torch.device
) -> RotaryTable:
    """cos and sin of positions 0 .. max_positions - 1.

    LongRoPE (arXiv 2402.13753) has short and long factors. transformers takes the long ones once a
    sequence is longer than the original positions, so that the KV of its first tokens would no
    longer be its own. Here the table has one set: the long one if requests may be longer, that is
    for more than the original positions and ``DRAFT_POSITIONS``.

    Args:
        rope: ``rope_type``, ``rope_theta`` and the type's parameters, in transformers' form;
            type "divided" divides each default frequency by one of ``divisors`` (GGUF's
            ``rope_freqs.weight``).
        head_dim: elements of a head; ``rope["partial_rotary_factor"]`` of them are rotated,
            without that key all.
        max_positions: rows of the table.
        device: where the table is.

    Raises:
        UnsupportedError: the type is unknown, or its frequencies depend on the running length.
        CheckpointError: a parameter of the type is missing or impossible.
    """
    inverse_frequencies, factor = _frequencies(rope, head_dim, max_positions - DRAFT_POSITIONS)
    if not (math.isfinite(factor) and inverse_frequencies.isfinite().all()):
        raise CheckpointError(
            f"rope type {short(rope['rope_type'])} gives frequencies that are not finite", _COMPARE
        )
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies[None, :]
    return RotaryTable((angles.cos() * factor).to(device), (angles.sin() * factor).to(device))


def no_rotation(max_positions: int, device: torch.device) -> RotaryTable:
    """The table of heads that are not rotated: two of [max_positions, 0]."""
    empty = torch.empty(max_positions, 0, dtype=torch.float32, device=device)
    return RotaryTable(empty, empty)


def _frequencies(rope: Mapping[str, Any], head_dim: int, longest: int) -> tuple[Tensor, float]:
    """[rotary_dim / 2] inverse frequencies, and the factor on cos and sin."""
    rope_type = rope["rope_type"]
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"{rotary_dim} elements of a head of {head_dim} cannot be rotated in pairs", _COMPARE
        )
    if rope_type == "dynamic":
        raise UnsupportedError(
            f"rope type {short(rope_type)} changes its frequencies with the running length, so a "
            "token's KV would depend on what follows it",
            _SUPPORTED,
        )
    if rope_type in SCALED_TYPES:
        return _scaled(rope, head_dim, longest)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    default = 1.0 / rope["rope_theta"] ** exponents
    if rope_type == "default":
        return default, 1.0
    if rope_type == "divided":
        divisors = torch.tensor(rope["divisors"], dtype=torch.float32)
        if divisors.shape != default.shape:
            raise CheckpointError(
                f"rope has {divisors.numel()} frequency divisors for {default.numel()} frequencies",
                "download or convert the checkpoint again",
            )
        return default / divisors, 1.0
    raise UnsupportedError(f"rope type {short(rope_type)} is not supported", _SUPPORTED)


def _scaled(rope: Mapping[str, Any], head_dim: int, longest: int) -> tuple[Tensor, float]:
    """Frequencies and factor from transformers' functions, for equal bits."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters=dict(rope),
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    try:
        compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        frequencies, factor = compute(config, torch.device("cpu"), longest)
        own = rope.get("attn_factor")
        if rope["rope_type"] == "yarn" and own is not None and not rope.get("attention_factor"):
            # Of YaRN's authors, and in DeepSeek-R1-0528-Qwen3-8B; transformers passes over it.
            factor *= own
        if rope["rope_type"] == LONGROPE:
            for key in ("short_factor", "long_factor"):
                if len(rope[key]) != len(frequencies):
                    raise ValueError(f"{len(frequencies)} frequencies, {len(rope[key])} in {key}")
        return frequencies, float(factor)
    except _BAD_PARAMETERS as error:
        raise CheckpointError(
            f"rope type {short(rope['rope_type'])} lacks a parameter or has a bad one ({error!r})",
            _COMPARE,
        ) from error

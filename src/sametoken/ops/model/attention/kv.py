"""Keys and values of one layer in memory, and their rounding to float8 e4m3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max


class KVScales(NamedTuple):
    """What float8 keys and values are multiplied with: two of [num_kv_heads], fp32."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's KV memory: two tensors [num_blocks, num_kv_heads, block_size, head_dim].

    Every row reads what is stored, rows of its own step too: float8 e4m3 stands for its number
    times the head's scale, and what a row writes is divided by it and rounded to nearest even, at
    most to 448 (docs/decisions/0035-kv-in-eight-bits.md).

    Attributes:
        scales: of float8; None: all are 1.
    """

    keys: Tensor
    values: Tensor
    scales: KVScales | None = None

    @property
    def k_scales(self) -> Tensor | None:
        """Scales of the keys."""
        return None if self.scales is None else self.scales.k

    @property
    def v_scales(self) -> Tensor | None:
        """Scales of the values."""
        return None if self.scales is None else self.scales.v


def as_stored(x: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """[T, num_kv_heads, head_dim] as it is stored in ``dtype``; NaN becomes the byte 0x7f.

    [T, width] is of one head.
    """
    if dtype != FLOAT8:
        return x.to(dtype)
    scaled = x.float() if scales is None else x.float() / scales[:, None]
    return torch.where(scaled.isnan(), math.nan, scaled.clamp(-_LARGEST, _LARGEST)).to(FLOAT8)


def as_read(stored: Tensor, scales: Tensor | None) -> Tensor:
    """[num_kv_heads, positions, head_dim] in fp32, as rows read it."""
    return stored.float() if scales is None else stored.float() * scales[:, None, None]

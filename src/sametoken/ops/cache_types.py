"""What a layer keeps between passes: declared by models, read by all that count or allocate it.

A model declares one of these per layer. Memory of blocks grows with a request, and layers
share its block table; memory of slots does not grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.ops.backend import LayerKV
from sametoken.ops.model.recurrent.rule import (
    LayerMemory,
    RecurrentRule,
)


class MemoryShape(NamedTuple):
    """Of one tensor, without the dimension of blocks or slots."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one block or slot."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Attention's keys and values of every position.

    Attributes:
        window: if given, a row sees its last so many positions only, its own included. Blocks
            behind it are kept all the same.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    window: int | None = None

    def block_shapes(self, block_size: int) -> tuple[MemoryShape, ...]:
        """What one block holds."""
        dims = (self.k_dim, self.v_dim)
        return tuple(MemoryShape((self.num_kv_heads, block_size, d), self.dtype) for d in dims)

    def slot_shapes(self, num_drafts: int) -> tuple[MemoryShape, ...]:
        """What one slot holds beside its blocks."""
        return ()

    def divided(self, size: int) -> PagedKV:
        """What each of ``size`` ranks keeps: its heads."""
        return replace(self, num_kv_heads=self.num_kv_heads // size)

    def part(self, keys: Tensor, values: Tensor) -> LayerKV:
        """What the layer is given of its memory."""
        return LayerKV(keys, values)


@dataclass(frozen=True, slots=True)
class LayerLatent:
    """One layer's memory [num_blocks, block_size, width] of vectors that heads share (MLA).

    Attributes:
        rank: the first so many elements of a vector are the values too.
    """

    vectors: Tensor
    rank: int

    @property
    def values(self) -> Tensor:
        """[num_blocks, block_size, rank], a part of ``vectors``."""
        return self.vectors[..., : self.rank]


@dataclass(frozen=True, slots=True)
class LatentKV:
    """One vector of every position, whose first ``rank`` elements are the values (MLA)."""

    rank: int
    rope_dim: int
    dtype: torch.dtype

    def block_shapes(self, block_size: int) -> tuple[MemoryShape, ...]:
        """What one block holds."""
        return (MemoryShape((block_size, self.rank + self.rope_dim), self.dtype),)

    def slot_shapes(self, num_drafts: int) -> tuple[MemoryShape, ...]:
        """What one slot holds beside its blocks."""
        return ()

    def divided(self, size: int) -> LatentKV:
        """What each of ``size`` ranks keeps: all of it, since every head reads it."""
        return self

    def part(self, vectors: Tensor) -> LayerLatent:
        """What the layer is given of its memory."""
        return LayerLatent(vectors, self.rank)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """One folded state per slot, and the raw inputs of the rows that are not folded yet.

    Attributes:
        dtype: in which raw inputs are kept; must hold the model's activations exactly.
    """

    rule: RecurrentRule
    dtype: torch.dtype

    def block_shapes(self, block_size: int) -> tuple[MemoryShape, ...]:
        """What one block holds."""
        return ()

    def slot_shapes(self, num_drafts: int) -> tuple[MemoryShape, ...]:
        """What one slot holds, with room for ``num_drafts`` pending rows: ``LayerMemory``."""
        rule, dtype = self.rule, self.dtype
        return (
            MemoryShape(rule.state_shape, torch.float32),
            MemoryShape((rule.conv_kernel - 1, rule.conv_channels), dtype),
            MemoryShape((num_drafts, rule.conv_channels), dtype),
            MemoryShape((num_drafts, sum(rule.gate_sizes)), dtype),
        )

    def divided(self, size: int) -> Recurrent:
        """What each of ``size`` ranks keeps."""
        return replace(self, rule=self.rule.divided(size))

    def part(self, *memory: Tensor) -> LayerMemory:
        """What the layer is given of its memory."""
        return LayerMemory(*memory)


LayerCache = PagedKV | LatentKV | Recurrent


def bytes_per_block(caches: Iterable[LayerCache], block_size: int) -> int:
    """Bytes of one block of ``block_size`` tokens over all layers."""
    return sum(one.nbytes for cache in caches for one in cache.block_shapes(block_size))


def bytes_per_slot(caches: Iterable[LayerCache], num_drafts: int) -> int:
    """Bytes of one slot beside its blocks, with room for ``num_drafts`` pending rows."""
    return sum(one.nbytes for cache in caches for one in cache.slot_shapes(num_drafts))

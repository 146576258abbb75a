"""Cache declarations: what layers keep between passes, one per layer of most models.

Block memory grows with a request, and layers share its block table; slot memory does not grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.attention.kv import FLOAT8, KVScales, LayerKV
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.model.recurrent.rule import STATE_STRIDE, LayerMemory, RecurrentRule


class MemoryShape(NamedTuple):
    """Shape and dtype of one cache tensor, without its block or slot dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one block or slot."""
        return prod(self.shape) * self.dtype.itemsize


class CacheDeclaration:
    """What a layer keeps; by default nothing, and the same on every rank."""

    __slots__ = ()

    def block_shapes(self, block_size: int) -> tuple[MemoryShape, ...]:
        """The tensors of one block."""
        return ()

    def slot_shapes(self, num_drafts: int) -> tuple[MemoryShape, ...]:
        """The tensors of one slot beside its blocks, with room for ``num_drafts`` drafts."""
        return ()

    def divided(self, size: int) -> Self:
        """The shard of one of ``size`` ranks."""
        return self


@dataclass(frozen=True, slots=True)
class PagedKV(CacheDeclaration):
    """Keys and values of every position, for paged attention.

    Attributes:
        num_kv_heads: 0 in a layer that reads another's.
        window: number of positions that a row sees, its own included; None: all.
        scales: this rank's, for float8; None: all are 1. No other dtype needs them.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    window: int | None = None
    scales: KVScales | None = field(default=None, compare=False)

    def block_shapes(self, block_size: int) -> tuple[MemoryShape, ...]:
        """See ``CacheDeclaration``."""
        dims = (self.k_dim, self.v_dim)
        return tuple(MemoryShape((self.num_kv_heads, block_size, d), self.dtype) for d in dims)

    def divided(self, size: int) -> PagedKV:
        """The shard of one of ``size`` ranks: its heads, or the one that it shares."""
        return replace(self, num_kv_heads=cdiv(self.num_kv_heads, size))

    def ranks_per_head(self, size: int) -> int:
        """Of ``size`` ranks, how many adjacent ones have the same heads."""
        return max(size // self.num_kv_heads, 1)

    def within(self, max_positions: int) -> PagedKV:
        """The cache of requests up to a length: a window that is no shorter is full attention."""
        whole = self.window is not None and self.window >= max_positions
        return replace(self, window=None) if whole else self

    def part(self, keys: Tensor, values: Tensor) -> LayerKV:
        """The layer's view of its memory."""
        return LayerKV(keys, values, self.scales if self.dtype == FLOAT8 else None)


@dataclass(frozen=True, slots=True)
class LatentKV(CacheDeclaration):
    """One latent vector per position, whose first ``rank`` elements are the values (MLA).

    Every rank has all of it, since every head reads it.

    Attributes:
        scale: [1] fp32, for float8; None: 1. No other dtype needs it.
    """

    rank: int
    rope_dim: int
    dtype: torch.dtype
    scale: Tensor | None = field(default=None, compare=False)

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return self.rank + self.rope_dim

    def block_shapes(self, block_size: int) -> tuple[MemoryShape, ...]:
        """See ``CacheDeclaration``."""
        return (MemoryShape((block_size, self.width), self.dtype),)

    def part(self, vectors: Tensor) -> LayerLatent:
        """The layer's view of its memory."""
        return LayerLatent(vectors, self.rank, self.scale if self.dtype == FLOAT8 else None)


@dataclass(frozen=True, slots=True)
class Recurrent(CacheDeclaration):
    """One folded state per slot, and the raw inputs of its pending rows.

    Attributes:
        dtype: of the raw inputs; must hold the model's activations exactly.
    """

    rule: RecurrentRule
    dtype: torch.dtype

    @property
    def state_shapes(self) -> tuple[MemoryShape, ...]:
        """A slot's state and the history of its convolution."""
        rule = self.rule
        return (
            MemoryShape(rule.state_shape, torch.float32),
            MemoryShape((rule.conv_kernel - 1, rule.conv_channels), self.dtype),
        )

    def slot_shapes(self, num_drafts: int) -> tuple[MemoryShape, ...]:
        """See ``CacheDeclaration``: ``LayerMemory``."""
        rule, dtype, num_pending = self.rule, self.dtype, max(num_drafts, STATE_STRIDE - 1)
        return (
            *self.state_shapes,
            MemoryShape((num_pending, rule.conv_channels), dtype),
            MemoryShape((num_pending, sum(rule.gate_sizes)), dtype),
        )

    def divided(self, size: int) -> Recurrent:
        """See ``CacheDeclaration``."""
        return replace(self, rule=self.rule.divided(size))

    def part(self, *memory: Tensor) -> LayerMemory:
        """The layer's view of its memory."""
        return LayerMemory(*memory)


@dataclass(frozen=True, slots=True)
class Stateless(CacheDeclaration):
    """A layer without a token mixer keeps nothing."""

    def part(self) -> None:
        """The layer has no memory."""


LayerCache = PagedKV | LatentKV | Recurrent | Stateless


def stored_in(caches: Iterable[LayerCache], dtype: torch.dtype) -> tuple[LayerCache, ...]:
    """The declarations with keys, values and latent vectors in ``dtype``."""
    return tuple(
        replace(cache, dtype=dtype) if isinstance(cache, PagedKV | LatentKV) else cache
        for cache in caches
    )


def divided(caches: Iterable[LayerCache], size: int) -> tuple[LayerCache, ...]:
    """Of declarations over ``size`` ranks, those of one."""
    return tuple(cache.divided(size) for cache in caches)


def bytes_per_block(caches: Iterable[LayerCache], block_size: int) -> int:
    """Bytes of one block of ``block_size`` tokens over all layers."""
    return sum(one.nbytes for cache in caches for one in cache.block_shapes(block_size))


def blocks_within(num_bytes: int, block_bytes: int) -> int:
    """Blocks that these bytes hold beside the reserved one."""
    return max(num_bytes // block_bytes - 1, 0)


def common_window(caches: Iterable[LayerCache]) -> int | None:
    """The widest window of the layers that share a block table; None if a layer sees all.

    Blocks behind it are read by no layer.
    """
    windows = [
        cache.window if isinstance(cache, PagedKV) else None
        for cache in caches
        if cache.block_shapes(1)
    ]
    widest = [window for window in windows if window is not None]
    return max(widest) if widest and len(widest) == len(windows) else None


def state_bytes(caches: Iterable[LayerCache]) -> int:
    """Bytes of one slot's recurrent states, without the raw inputs of rows after them."""
    recurrent = (cache for cache in caches if isinstance(cache, Recurrent))
    return sum(one.nbytes for cache in recurrent for one in cache.state_shapes)


def bytes_per_slot(caches: Iterable[LayerCache], num_drafts: int) -> int:
    """Bytes of one slot beside its blocks, with room for ``num_drafts`` drafts."""
    return sum(one.nbytes for cache in caches for one in cache.slot_shapes(num_drafts))

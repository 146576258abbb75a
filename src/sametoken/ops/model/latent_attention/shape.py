"""Types of latent attention (MLA, DeepSeek-V2, arXiv 2405.04434).

A token keeps one vector, its normed latent (``rank`` elements) and a rotated key (``rope_dim``).
In the absorbed form all heads attend to it alike: their queries are taken into the latent space by
``W_UK``, and the weighted latents out of it by ``W_UV``, one matrix per head each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sametoken.ops.model.attention.shape import AttentionShape

#: What kernels take head sizes in.
_MULTIPLE = 8

#: Most bytes of keys and values at once, of more heads than one.
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Head count and sizes of one layer of latent attention.

    Attributes:
        rank: elements of a latent, which are the values.
        rope_dim: rotated elements after them.
        scale: factor on the scores.
    """

    num_heads: int
    rank: int
    rope_dim: int
    scale: float

    @property
    def width(self) -> int:
        """Elements of a token's vector, and of a query."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class ExpandedShape:
    """Sizes of the same heads in the expanded form: each has keys and values of its own.

    A key is its part that is not rotated, the rotated key, then zeros; a value ends in zeros too.

    Attributes:
        nope_dim, v_dim: elements of a key that are not rotated, and of a value.
    """

    latent: LatentShape
    nope_dim: int
    v_dim: int

    @property
    def key_dim(self) -> int:
        """Elements of a key and of a query, without zeros."""
        return self.nope_dim + self.latent.rope_dim

    @property
    def head_dim(self) -> int:
        """Elements of a key, and of a value."""
        return -(-max(self.key_dim, self.v_dim) // _MULTIPLE) * _MULTIPLE

    @property
    def attention(self) -> AttentionShape:
        """As any attention whose heads have keys and values of their own."""
        heads = self.latent.num_heads
        return AttentionShape(heads, heads, self.head_dim, score_factor=self.latent.scale)

    def of_heads(self, count: int) -> ExpandedShape:
        """The shape of fewer heads."""
        return replace(self, latent=replace(self.latent, num_heads=count))

    def num_at_once(self, num_positions: int, dtype: torch.dtype) -> int:
        """Heads whose keys and values of ``num_positions`` fit in ``MOST_BYTES``, or one.

        All, a half, a quarter and so on: kernels are compiled for each number.
        """
        count = self.latent.num_heads
        while count > 1 and count * self._head_bytes(num_positions, dtype) > MOST_BYTES:
            count = 1 if count % 2 else count // 2
        return count

    def most_bytes(self, num_positions: int, dtype: torch.dtype) -> int:
        """The most bytes of keys and values at once, of at most ``num_positions``."""
        one = self._head_bytes(num_positions, dtype)
        return max(one, min(MOST_BYTES, self.latent.num_heads * one))

    def _head_bytes(self, num_positions: int, dtype: torch.dtype) -> int:
        return 2 * num_positions * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerLatent:
    """One layer's memory [num_blocks, block_size, width] of latent vectors that heads share.

    Float8 vectors are written and read as ``LayerKV``'s keys of one head are.

    Attributes:
        rank: number of leading elements of a vector that are its values.
        scale: [1] fp32, of float8 vectors; None: 1.
    """

    vectors: Tensor
    rank: int
    scale: Tensor | None = None

    def read(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """The vectors of [B] blocks in ``dtype``, as rows read them: [B, block_size, width]."""
        vectors = self.vectors[blocks].to(dtype)
        return vectors if self.scale is None else vectors.mul_(self.scale)


@dataclass(frozen=True, slots=True)
class LatentRotary:
    """The norm of a row's latent, and the rotation of its key and its queries.

    Attributes:
        weight: [rank], the RMS norm's; in the activations' dtype or fp32.
        eps: epsilon of that norm.
        cos, sin: [max_positions, rope_dim / 2] fp32.
        interleaved: whether elements 2j and 2j + 1 are a pair, else j and j + rope_dim / 2.
            Rotated pairs lie at j and j + rope_dim / 2 either way.
    """

    weight: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    interleaved: bool


class HeadWeights(Protocol):
    """One matrix [N, K] per head, in the layout of its products."""

    @property
    def nbytes(self) -> int: ...

    def heads(self, first: int, last: int) -> HeadWeights:
        """The matrices of heads ``first .. last - 1``, in the same memory."""
        ...

    def transposed(self) -> HeadWeights:
        """The matrices [K, N], in the same memory where the layout allows."""
        ...

    def matmul(self, x: Tensor, out: Tensor) -> None:
        """Write ``x[:, h] @ weight[h].T`` into ``out[:, h]``, summed in fp32, rounded once.

        [T, H, K] -> [T, H, N] of one dtype, or B blocks of rows: [B, T, H, K] -> [B, T, H, N]. Both
        may be strided, except in the last dimension. A row's bits do not depend on the number of
        rows.
        """
        ...

"""Types of latent attention (MLA, DeepSeek-V2, arXiv 2405.04434), in the absorbed form.

A token keeps one vector, its normed latent (``rank`` elements) and a rotated key (``rope_dim``).
All heads attend to it alike: their queries are taken into the latent space by ``W_UK``, and the
weighted latents out of it by ``W_UV``, one matrix per head each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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
class LayerLatent:
    """One layer's memory [num_blocks, block_size, width] of latent vectors that heads share.

    Attributes:
        rank: number of leading elements of a vector that are its values.
    """

    vectors: Tensor
    rank: int


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

    def matmul(self, x: Tensor, out: Tensor) -> None:
        """Write ``x[:, h] @ weight[h].T`` into ``out[:, h]``, summed in fp32, rounded once.

        [T, H, K] -> [T, H, N] of one dtype; both may be strided, except in the last dimension.
        A row's bits do not depend on the number of rows.
        """
        ...

"""Latent attention (MLA): a layer's projections around what its kernels do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.layers.attention import wanted_queries
from sametoken.layers.linear import Linear, Projection
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import Matrices
from sametoken.ops.backend import AttentionRows, KeptRows, Kernels
from sametoken.ops.model.latent_attention.shape import (
    HeadWeights,
    LatentRotary,
    LatentShape,
    LayerLatent,
)


class Queries(Protocol):
    """From the first part of a fused projection to the queries of all heads."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, num_heads * (nope_dim + rope_dim)]; ``x`` may be strided."""
        ...


class WholeQueries:
    """The projection gives the queries themselves."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x


@dataclass(frozen=True, slots=True)
class LowRankQueries(Matrices):
    """Queries from a normed vector of low rank (q_lora_rank)."""

    norm: RMSNorm
    heads: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, q_lora_rank] -> [T, num_heads * (nope_dim + rope_dim)]."""
        return self.heads(self.norm(x))


@dataclass(frozen=True, slots=True)
class LatentAttention(Matrices):
    """Latent attention (MLA) in the absorbed form for every row, or this rank's heads of it.

    One form for prompts, decode and windows: with the expanded form for prompts a token's KV and
    its output would have other bits there (docs/decisions/0031-latent-attention-is-absorbed.md).

    Attributes:
        shape: head count of this rank, and sizes.
        projection: fused projection to [queries or their low rank | latent | rotated key].
        queries: from the first part to the queries, [not rotated | rotated] per head.
        rotary: norm of the latent, rotation of the key and the queries.
        absorb: W_UK, from a query's elements that are not rotated to the latent space.
        expand: W_UV, from weighted latents to a head's values.
        v_dim: elements of those.
        output: projection of the heads to the hidden size.
    """

    kernels: Kernels
    shape: LatentShape
    projection: Linear
    queries: Queries
    rotary: LatentRotary
    absorb: HeadWeights
    expand: HeadWeights
    v_dim: int
    output: Projection

    def __call__(
        self, x: Tensor, rows: AttentionRows, memory: LayerLatent, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; ``kept`` is as in ``Attention``."""
        shape, kernels = self.shape, self.kernels
        fused = self.projection(x)
        q, latent = fused.split((fused.shape[1] - shape.width, shape.width), dim=-1)
        q = self.queries(q).unflatten(-1, (shape.num_heads, -1))
        not_rotated = q.shape[-1] - shape.rope_dim
        absorbed = q.new_empty(*q.shape[:2], shape.width)
        self.absorb.matmul(q[..., :not_rotated], absorbed[..., : shape.rank])
        kernels.latent_rope_and_cache(
            q[..., not_rotated:], latent, self.rotary, rows, memory, absorbed[..., shape.rank :]
        )
        absorbed, wanted = wanted_queries(kernels, absorbed, rows, kept)
        attended = kernels.latent_attention(absorbed, shape.scale, wanted, memory)
        values = attended.new_empty(*attended.shape[:2], self.v_dim)
        self.expand.matmul(attended, values)
        return self.output(values.flatten(1))

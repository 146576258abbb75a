"""Latent attention (MLA): a layer's projections around what its kernels do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.layers.attention import wanted_queries
from sametoken.layers.expanded_heads import ExpandedHeads
from sametoken.layers.linear import Linear, Projection
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import Matrices
from sametoken.ops.backend import AttentionRows, KeptRows, Kernels
from sametoken.ops.model.latent_attention.shape import (
    ExpandedShape,
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
    """Latent attention (MLA), or this rank's heads of it.

    Rows are absorbed, of prompts, windows and decode alike: in another form a token's KV and its
    output have other bits. Prompts in the fast form are expanded in every step, except for their
    last token (docs/decisions/0044-long-latent-prompts-can-be-expanded.md).

    Attributes:
        shape: head count of this rank, and sizes.
        expanded: the same in the expanded form.
        projection: fused projection to [queries or their low rank | latent | rotated key].
        queries: from the first part to the queries, [not rotated | rotated] per head.
        rotary: norm of the latent, rotation of the key and the queries.
        absorb: W_UK, from a query's elements that are not rotated to the latent space.
        expand: W_UV, from weighted latents to a head's values.
        output: projection of the heads to the hidden size.
    """

    kernels: Kernels
    shape: LatentShape
    expanded: ExpandedShape
    projection: Linear
    queries: Queries
    rotary: LatentRotary
    absorb: HeadWeights
    expand: HeadWeights
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
        # No kept row is in the fast form: a prompt's last token is absorbed.
        expanded = rows.expanded if kept is None else None
        absorbed_rows = expanded.others if expanded else rows
        count = len(absorbed_rows.positions)
        absorbed = q.new_empty(*q.shape[:2], shape.width)
        self.absorb.matmul(q[:count, :, :not_rotated], absorbed[:count, :, : shape.rank])
        rotated = absorbed[..., shape.rank :]
        kernels.latent_rope_and_cache(
            q[..., not_rotated:], latent, self.rotary, rows, memory, rotated
        )
        absorbed_q, wanted = wanted_queries(kernels, absorbed[:count], absorbed_rows, kept)
        attended = kernels.latent_attention(absorbed_q, shape.scale, wanted, memory)
        num_rows = len(q) if expanded else len(attended)
        values = attended.new_empty(num_rows, shape.num_heads, self.expanded.v_dim)
        self.expand.matmul(attended, values[: len(attended)])
        if expanded:
            heads = ExpandedHeads(kernels, self.expanded, self.absorb, self.expand)
            for chunk in expanded.chunks:
                own = chunk.rows
                heads.attend(q[own], rotated[own], chunk, memory, values[own])
        return self.output(values.flatten(1))

"""Latent attention in its expanded form: keys and values of every head, computed from latents."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from sametoken.ops.backend import ChunkRows, KeptRows, Kernels, LayerKV, RowRuns
from sametoken.ops.model.latent_attention.shape import ExpandedShape, HeadWeights, LayerLatent


@dataclass(frozen=True, slots=True)
class ExpandedHeads:
    """The heads of a latent attention, each with keys and values of its own.

    A head has the bits that it has alone, and a row those that it has in any chunk, as
    ``HeadWeights.matmul`` and ``Kernels.attention`` give them.

    Attributes:
        absorb, expand: W_UK and W_UV, as in ``LatentAttention``.
    """

    kernels: Kernels
    shape: ExpandedShape
    absorb: HeadWeights
    expand: HeadWeights

    def attend(
        self, q: Tensor, rotated: Tensor, chunk: ChunkRows, memory: LayerLatent, out: Tensor
    ) -> None:
        """Causal attention of a chunk's N rows over all positions that it sees.

        Args:
            q: [N, H, nope_dim + rope_dim], before rotation; may be written.
            rotated: [N, H, rope_dim], the last elements after it.
            chunk: its positions, and the blocks of what it sees.
            memory: the layer's vectors, the chunk's own included.
            out: [N, H, v_dim], written.
        """
        shape, vectors = self.shape, memory.vectors[chunk.blocks]
        # What an earlier owner left there may be of any size.
        vectors.flatten(0, 1)[chunk.stop :] = 0
        padding = shape.head_dim - shape.key_dim
        q = functional.pad(q, (0, padding)) if padding else q.contiguous()
        q[..., shape.nope_dim : shape.key_dim] = rotated
        num_heads, at_once = q.shape[1], shape.num_at_once(vectors.shape[:2].numel(), q.dtype)
        for first in range(0, num_heads, at_once):
            last = min(first + at_once, num_heads)
            some = self._heads(first, last)
            attended = some._attention(
                q[:, first:last].contiguous(), chunk.positions, some._keys_values(vectors)
            )
            out[:, first:last] = attended[..., : shape.v_dim]

    def _heads(self, first: int, last: int) -> ExpandedHeads:
        return replace(
            self,
            shape=self.shape.of_heads(last - first),
            absorb=self.absorb.heads(first, last),
            expand=self.expand.heads(first, last),
        )

    def _keys_values(self, vectors: Tensor) -> LayerKV:
        """Of [B, block_size, rank + rope_dim] vectors: two [B, H, block_size, head_dim]."""
        shape, latent = self.shape, self.shape.latent
        num_blocks, block_size, _ = vectors.shape
        latents, rotated = vectors[:, :, None].tensor_split([latent.rank], dim=-1)
        latents = latents.expand(-1, -1, latent.num_heads, -1)
        keys, values = (
            vectors.new_empty(num_blocks, latent.num_heads, block_size, shape.head_dim)
            for _ in range(2)
        )
        # By row, then by head, as products have them.
        rows_of_keys, rows_of_values = keys.transpose(1, 2), values.transpose(1, 2)
        self.absorb.transposed().matmul(latents, rows_of_keys[..., : shape.nope_dim])
        rows_of_keys[..., shape.nope_dim : shape.key_dim] = rotated
        keys[..., shape.key_dim :] = 0
        self.expand.matmul(latents, rows_of_values[..., : shape.v_dim])
        values[..., shape.v_dim :] = 0
        return LayerKV(keys, values)

    def _attention(self, q: Tensor, positions: Tensor, kv: LayerKV) -> Tensor:
        """[N, H, head_dim] -> the same."""
        # No pass's own rows: keys and values before the first were written just now, too.
        rows = KeptRows(
            index=positions,
            positions=positions,
            slots=torch.zeros_like(positions),
            block_table=torch.arange(len(kv.keys), device=q.device)[None],
            runs=RowRuns.even(1, len(q)),
        )
        return self.kernels.attention(q, self.shape.attention, rows, kv).view(q.shape)

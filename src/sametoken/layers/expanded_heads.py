"""Latent attention in its expanded form: keys and values of every head, computed from latents."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
            q: [N, H, nope_dim].
            rotated: [N, H, rope_dim], after rotation.
            chunk: its positions, and the blocks of what it sees.
            memory: the layer's vectors, the chunk's own included.
            out: [N, H, v_dim], written.
        """
        shape, vectors = self.shape, memory.vectors[chunk.blocks]
        # What an earlier owner left there may be of any size.
        vectors.flatten(0, 1)[chunk.stop :] = 0
        num_heads, key_dim = shape.latent.num_heads, shape.key_dim
        queries = q.new_empty(num_heads, len(q), shape.head_dim)
        queries[..., : shape.nope_dim] = q.transpose(0, 1)
        queries[..., shape.nope_dim : key_dim] = rotated.transpose(0, 1)
        queries[..., key_dim:] = 0
        at_once = shape.num_at_once(vectors.shape[:2].numel(), q.dtype)
        for first in range(0, num_heads, at_once):
            part = slice(first, min(first + at_once, num_heads))
            some = self._heads(part)
            attended = some._attention(queries[part], chunk.positions, some._keys_values(vectors))
            out[:, part] = attended[..., : shape.v_dim].transpose(0, 1)

    def _heads(self, part: slice) -> ExpandedHeads:
        first, last = part.start, part.stop
        latent = replace(self.shape.latent, num_heads=last - first)
        return replace(
            self,
            shape=replace(self.shape, latent=latent),
            absorb=self.absorb.heads(first, last),
            expand=self.expand.heads(first, last),
        )

    def _keys_values(self, vectors: Tensor) -> LayerKV:
        """Of B blocks of vectors: two [H * B, 1, block_size, head_dim], head by head."""
        num_blocks, block_size, _ = vectors.shape
        shape, latent = self.shape, self.shape.latent
        latents, rotated = vectors.flatten(0, 1).tensor_split([latent.rank], dim=-1)
        latents = latents[:, None].expand(-1, latent.num_heads, -1)
        size = (latent.num_heads, num_blocks * block_size, shape.head_dim)
        keys, values = vectors.new_empty(size), vectors.new_empty(size)
        self.absorb.transposed().matmul(latents, keys[..., : shape.nope_dim].transpose(0, 1))
        keys[..., shape.nope_dim : shape.key_dim] = rotated
        keys[..., shape.key_dim :] = 0
        self.expand.matmul(latents, values[..., : shape.v_dim].transpose(0, 1))
        values[..., shape.v_dim :] = 0
        blocks = (-1, 1, block_size, shape.head_dim)
        return LayerKV(keys.view(blocks), values.view(blocks))

    def _attention(self, queries: Tensor, positions: Tensor, kv: LayerKV) -> Tensor:
        """[H, N, head_dim] -> the same."""
        num_heads, num_rows, size = queries.shape
        heads = torch.arange(num_heads, device=queries.device)
        positions = positions.repeat(num_heads)
        # No pass's own rows: keys and values before the first were written just now, too.
        rows = KeptRows(
            index=positions,
            positions=positions,
            slots=heads.repeat_interleave(num_rows),
            block_table=torch.arange(len(kv.keys), device=queries.device).view(num_heads, -1),
            runs=RowRuns.even(num_heads, num_rows),
        )
        attended = self.kernels.attention(queries.reshape(-1, 1, size), self.shape.head, rows, kv)
        return attended.view(queries.shape)

"""Latent attention in its expanded form: keys and values of every head, computed from latents."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from sametoken.ops.backend import Kernels, LayerKV
from sametoken.ops.expanded_rows import ChunkRows
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
        shape, vectors = self.shape, memory.read(chunk.blocks, q.dtype)
        # What an earlier owner left there may be of any size.
        vectors.flatten(0, 1)[chunk.stop :] = 0
        padding = shape.head_dim - shape.key_dim
        q = functional.pad(q, (0, padding)) if padding else q.contiguous()
        q[..., shape.nope_dim : shape.key_dim] = rotated
        num_heads = q.shape[1]
        count = shape.num_at_once(vectors.shape[:2].numel(), q.dtype)
        for first in range(0, num_heads, count):
            some = self if count == num_heads else self._heads(first, first + count)
            part = slice(first, first + count)
            attended = self.kernels.attention(
                q[:, part].contiguous(),
                some.shape.attention,
                chunk.queries,
                some._keys_values(vectors),  # Of one group of heads at a time.
            )
            out[:, part] = attended.unflatten(1, (count, -1))[..., : shape.v_dim]

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
        size = num_blocks, latent.num_heads, block_size, shape.head_dim
        # Zeros behind what is written.
        keys, values = (
            vectors.new_empty(size) if used == shape.head_dim else vectors.new_zeros(size)
            for used in (shape.key_dim, shape.v_dim)
        )
        # By row, then by head, as products have them.
        rows_of_keys, rows_of_values = keys.transpose(1, 2), values.transpose(1, 2)
        self.absorb.transposed().matmul(latents, rows_of_keys[..., : shape.nope_dim])
        rows_of_keys[..., shape.nope_dim : shape.key_dim] = rotated
        self.expand.matmul(latents, rows_of_values[..., : shape.v_dim])
        return LayerKV(keys, values)

"""Slots with latent vectors in shuffled blocks of poisoned memory, and rows that attend to them."""

from __future__ import annotations

import torch

from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.attention.kv import FLOAT8, as_stored
from sametoken.ops.model.latent_attention.shape import LayerLatent


class LatentScene:
    """Vectors of ``lengths`` positions; elsewhere memory is finite but huge, and keys are NaN.

    A GPU kernel multiplies the latents that it does not see by 0, so they are finite. With a scale
    memory is float8.
    """

    def __init__(
        self,
        lengths,
        *,
        heads=3,
        rank=24,
        rope_dim=8,
        dtype=torch.float32,
        block_size=16,
        seed=0,
        scale=None,
    ):
        torch.manual_seed(seed)
        self.heads, self.width, self.dtype = heads, rank + rope_dim, dtype
        max_blocks = -(-max(lengths) // block_size) + 1
        num_blocks = max_blocks * len(lengths)
        table = torch.randperm(num_blocks).view(len(lengths), max_blocks)
        self.table = torch.cat((table, torch.full((1, max_blocks), num_blocks)))
        stored = dtype if scale is None else FLOAT8
        scale = None if scale is None else torch.tensor([scale])
        huge = min(1e30, torch.finfo(stored).max)
        vectors = torch.full((num_blocks + 1, block_size, self.width), huge).to(stored)
        vectors[..., rank:] = torch.nan
        vectors[-1] = 0.0
        self.vectors = [torch.randn(n, self.width).to(dtype) for n in lengths]
        for slot, own in enumerate(self.vectors):
            at = torch.arange(len(own))
            rounded = as_stored(own, stored, scale)
            vectors[self.table[slot, at // block_size], at % block_size] = rounded
            self.vectors[slot] = rounded.float() * (1 if scale is None else scale)
        self.memory = LayerLatent(vectors, rank, scale)

    def rows(self, where, runs=None):
        """Queries that depend on slot and position alone, and the rows of (slot, position)."""
        slots, positions = (torch.tensor(column) for column in zip(*where, strict=True))
        everywhere = torch.randn(
            200, self.heads, self.width, generator=torch.Generator().manual_seed(1)
        ).to(self.dtype)
        q = everywhere[(slots * 67 + positions) % 200]
        return q, AttentionRows(positions, slots, torch.zeros_like(slots), self.table, runs)

    def expected(self, q, rows, scale):
        """The plain form in fp64: [T, heads, rank]."""
        out = torch.empty(len(q), self.heads, self.memory.rank, dtype=torch.float64)
        pairs = zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        for row, (slot, position) in enumerate(pairs):
            seen = self.vectors[slot][: position + 1].double()
            weights = torch.softmax(q[row].double() @ seen.T * scale, dim=-1)
            out[row] = weights @ seen[:, : self.memory.rank]
        return out

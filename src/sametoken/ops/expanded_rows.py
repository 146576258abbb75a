"""Rows of prompts whose latents are expanded: the fast form of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, KeptRows, RowRuns
from sametoken.types.fast_prompts import ExpandedChunk


@dataclass(frozen=True)
class ExpandedRows:
    """The last live rows of a pass, one run for each chunk.

    Attributes:
        others: the rows before them.
        pass_rows: all rows of the pass.
        parts: the chunks, whose rows follow each other.
        block_size: positions of a KV block.
    """

    others: AttentionRows
    pass_rows: AttentionRows
    parts: tuple[ExpandedChunk, ...]
    block_size: int

    @cached_property
    def chunks(self) -> tuple[ChunkRows, ...]:
        """What latent attention reads, laid out once for all layers."""
        return tuple(ChunkRows.of(one, self.pass_rows, self.block_size) for one in self.parts)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One chunk of a prompt.

    Attributes:
        rows: its N rows in the pass.
        blocks: [B] int64, the blocks of all positions that it sees.
        stop: how many these are.
        queries: the rows as readers of these blocks alone, one after the other.
    """

    rows: slice
    blocks: Tensor
    stop: int
    queries: KeptRows

    @classmethod
    def of(cls, chunk: ExpandedChunk, rows: AttentionRows, block_size: int) -> ChunkRows:
        """Of one chunk of a pass's rows."""
        own = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        blocks = rows.block_table[chunk.slot, : -(-chunk.stop // block_size)]
        # A view may be unaligned, and would cost a compilation.
        positions = rows.positions[own].clone()
        # No pass's own rows: keys and values before the first are written in this pass, too.
        queries = KeptRows(
            index=positions,
            positions=positions,
            slots=torch.zeros_like(positions),
            block_table=torch.arange(len(blocks), device=blocks.device)[None],
            runs=RowRuns.even(1, chunk.num_rows),
        )
        return cls(own, blocks, chunk.stop, queries)

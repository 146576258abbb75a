"""Rows of prompts that attend in the expanded form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sametoken.ops.backend import AttentionRows, KeptRows


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """Rows of prompts in the expanded form of latent attention, the last of a pass.

    Attributes:
        others: the rows before them.
        chunks: of each chunk its rows.
    """

    others: AttentionRows
    chunks: tuple[ChunkRows, ...]


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

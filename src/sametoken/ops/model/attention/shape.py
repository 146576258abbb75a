"""Head counts and sizes of attention, its rotation and its norms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Head counts and sizes of one attention layer.

    Attributes:
        sliding_window: number of positions that a row sees, its own included; None: all.
        score_factor: factor on the scores; None: 1 / sqrt(head_dim).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    score_factor: float | None = None

    @property
    def q_size(self) -> int:
        """Width of the query part of a fused qkv row."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) part of a fused qkv row."""
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5) if self.score_factor is None else self.score_factor


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin by position: two fp32 tensors [max_positions, rotary_dim / 2].

    Applied in the "rotate half" form: element j pairs with element j + rotary_dim / 2;
    elements from rotary_dim on pass unchanged, all of them in a table of width 0.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Per-head RMS norm of queries and keys before RoPE (Qwen3): two weights [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float

"""Causal self-attention over paged KV."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.kernels.interface import (
    AttentionRows,
    AttentionShape,
    Kernels,
    LayerKV,
    QKNorm,
    RotaryTable,
)
from sametoken.layers.linear import Linear, Projection


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention block, or the heads of it that are on this rank.

    Attributes:
        shape: head counts of this rank.
        qkv: fused projection to [q | k | v].
        output: projection of the heads back to the hidden size.
        qk_norm: per-head norm of q and k before RoPE, if the architecture has one.
    """

    kernels: Kernels
    shape: AttentionShape
    qkv: Linear
    output: Projection
    rotary: RotaryTable
    qk_norm: QKNorm | None = None

    def __call__(
        self, x: Tensor, rows: AttentionRows, kv: LayerKV, kept: Tensor | None = None
    ) -> Tensor:
        """[T, in_features] -> [T, hidden]; writes the rows' KV before any row reads it.

        With ``kept``, [R] int64, what those rows put out alone: [R, hidden].
        """
        q = self.kernels.rope_and_cache(
            self.qkv(x), self.shape, self.rotary, rows, kv, self.qk_norm
        )
        return self.output(
            self.kernels.take_rows(self.kernels.attention(q, self.shape, rows, kv), kept)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        return self.qkv.nbytes + self.output.nbytes

"""Causal self-attention whose output passes a sigmoid gate."""

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
class GatedAttention:
    """One attention block with an output gate per element of every head.

    Attributes:
        shape: head counts of this rank.
        projection: fused projection to [gate | q | k | v].
        output: projection of the heads back to the hidden size.
        qk_norm: per-head norm of q and k before RoPE.
    """

    kernels: Kernels
    shape: AttentionShape
    projection: Linear
    output: Projection
    rotary: RotaryTable
    qk_norm: QKNorm

    def __call__(
        self, x: Tensor, rows: AttentionRows, kv: LayerKV, kept: Tensor | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes the rows' KV before any row reads it.

        With ``kept``, [R] int64, what those rows put out alone: [R, hidden].
        """
        shape = self.shape
        sizes = (shape.q_size, shape.q_size + 2 * shape.kv_size)
        gate, qkv = self.projection(x).split(sizes, dim=-1)
        q = self.kernels.rope_and_cache(qkv, shape, self.rotary, rows, kv, self.qk_norm)
        attended = self.kernels.attention(q, shape, rows, kv)
        return self.output(self.kernels.take_rows(self.kernels.sigmoid_mul(attended, gate), kept))

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        return self.projection.nbytes + self.output.nbytes

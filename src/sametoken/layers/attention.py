"""Causal self-attention over paged KV.

Causal self-attention whose output passes a sigmoid gate.

The Gated DeltaNet block: linear attention whose memory is one state per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.layers.linear import Linear, Projection
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    Kernels,
    LayerKV,
    QKNorm,
    RotaryTable,
)
from sametoken.ops.model.gated_delta_rule.rule import GatedDeltaParams
from sametoken.ops.model.recurrent.rule import (
    LayerMemory,
    RawRows,
    RecurrentPass,
)


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


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One Gated DeltaNet block, or the heads of it that are on this rank.

    Attributes:
        projection: fused projection to [q | k | v | z | b | a].
        params: weights of the convolution and of the gates, and the sizes of this rank.
        norm_weight: [value_dim], of the norm of every value head's output, before the gate z.
        eps: of that norm.
        output: projection of the value heads back to the hidden size.
    """

    kernels: Kernels
    projection: Linear
    params: GatedDeltaParams
    norm_weight: Tensor
    eps: float
    output: Projection

    def __call__(self, x: Tensor, step: RecurrentPass, memory: LayerMemory) -> Tensor:
        """[T, hidden] -> [T, hidden]; advances the rows' slots.

        Args:
            x: [T, hidden].
            step: the pass over the recurrent state.
            memory: what the slots keep in this layer.
        """
        rule = self.params.rule
        sizes = (rule.conv_channels, rule.out_features, *rule.gate_sizes)
        mixed_qkv, z, b, a = self.projection(x).split(sizes, dim=-1)
        attended = step.run(self.params, RawRows(mixed_qkv, (a, b)), memory)
        return self.output(self.kernels.gated_rms_norm(attended, z, self.norm_weight, self.eps))

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        return self.projection.nbytes + self.output.nbytes

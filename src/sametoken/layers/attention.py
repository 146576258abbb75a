"""Attention blocks: causal self-attention over paged KV, plain or gated, and Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.layers.linear import Linear, Projection
from sametoken.layers.residual import Matrices, kept_of
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    KeptRows,
    Kernels,
    LayerKV,
    QKNorm,
    QueryRows,
    RotaryTable,
)
from sametoken.ops.model.gated_delta_rule.rule import GatedDeltaParams
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows, RecurrentPass
from sametoken.ops.weight import Normed


def wanted_queries(
    kernels: Kernels, q: Tensor, rows: AttentionRows, kept: KeptRows | None
) -> tuple[Tensor, QueryRows]:
    """The queries whose result is wanted, [T, H, D] or [R, H, D], and their rows."""
    if kept is None:
        return q, rows
    return kernels.take_rows(q.flatten(1), kept.index).unflatten(1, q.shape[1:]), kept


@dataclass(frozen=True, slots=True)
class Attention(Matrices):
    """Causal self-attention over paged KV, or this rank's heads of it.

    Attributes:
        shape: head counts of this rank.
        qkv: fused projection to [q | k | v].
        output: projection of the heads to the hidden size.
        qk_norm: per-head norm of q and k before RoPE, if any.
        sinks: [num_heads] fp32, a logit per head without a value, if any (``Kernels.attention``).
    """

    kernels: Kernels
    shape: AttentionShape
    qkv: Linear
    output: Projection
    rotary: RotaryTable
    qk_norm: QKNorm | None = None
    sinks: Tensor | None = None

    def __call__(
        self, x: Normed, rows: AttentionRows, kv: LayerKV, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, in_features] -> [T, hidden]; writes the rows' KV before any row reads it.

        With ``kept`` only those rows are returned: [R, hidden].
        """
        q = self.kernels.rope_and_cache(
            self.qkv(x), self.shape, self.rotary, rows, kv, self.qk_norm
        )
        q, wanted = wanted_queries(self.kernels, q, rows, kept)
        return self.output(self.kernels.attention(q, self.shape, wanted, kv, self.sinks))


@dataclass(frozen=True, slots=True)
class PositionScaledAttention(Matrices):
    """``Attention`` with queries that are multiplied by a factor of their position, after RoPE.

    Attributes:
        factors: [max_positions] fp32.
    """

    attention: Attention
    factors: Tensor

    def __call__(
        self, x: Normed, rows: AttentionRows, kv: LayerKV, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, in_features] -> [T, hidden]; ``kept`` is as in ``Attention``."""
        own = self.attention
        q = own.kernels.rope_and_cache(own.qkv(x), own.shape, own.rotary, rows, kv, own.qk_norm)
        q, wanted = wanted_queries(own.kernels, q, rows, kept)
        q = q * self.factors[wanted.positions].to(q.dtype)[:, None, None]
        return own.output(own.kernels.attention(q, own.shape, wanted, kv))


@dataclass(frozen=True, slots=True)
class GatedAttention(Matrices):
    """``Attention`` with a sigmoid gate on every output element of the heads.

    Attributes:
        shape: head counts of this rank.
        projection: fused projection to [gate | q | k | v].
        output: projection of the heads to the hidden size.
        qk_norm: per-head norm of q and k before RoPE.
    """

    kernels: Kernels
    shape: AttentionShape
    projection: Linear
    output: Projection
    rotary: RotaryTable
    qk_norm: QKNorm

    def __call__(
        self, x: Normed, rows: AttentionRows, kv: LayerKV, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; ``kept`` is as in ``Attention``."""
        shape = self.shape
        sizes = (shape.q_size, shape.q_size + 2 * shape.kv_size)
        gate, qkv = self.projection(x).split(sizes, dim=-1)
        q = self.kernels.rope_and_cache(qkv, shape, self.rotary, rows, kv, self.qk_norm)
        q, wanted = wanted_queries(self.kernels, q, rows, kept)
        attended = self.kernels.attention(q, shape, wanted, kv)
        return self.output(self.kernels.sigmoid_mul(attended, kept_of(gate, kept)))


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(Matrices):
    """Gated DeltaNet, linear attention with one state per slot, or this rank's heads of it.

    Attributes:
        projection: fused projection to [q | k | v | z | b | a].
        params: weights of the convolution and the gates, and this rank's sizes.
        norm_weight: [value_dim], weight of the norm of each value head before the gate z.
        eps: epsilon of that norm.
        output: projection of the value heads to the hidden size.
    """

    kernels: Kernels
    projection: Linear
    params: GatedDeltaParams
    norm_weight: Tensor
    eps: float
    output: Projection

    def __call__(
        self, x: Normed, step: RecurrentPass, memory: LayerMemory, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; advances the rows' slots. ``kept`` is as in ``Attention``."""
        rule = self.params.rule
        sizes = (rule.conv_channels, rule.out_features, *rule.gate_sizes)
        mixed_qkv, z, b, a = self.projection(x).split(sizes, dim=-1)
        attended = step.run(self.params, RawRows(mixed_qkv, (a, b)), memory)
        attended, z = kept_of(attended, kept), kept_of(z, kept)
        return self.output(self.kernels.gated_rms_norm(attended, z, self.norm_weight, self.eps))

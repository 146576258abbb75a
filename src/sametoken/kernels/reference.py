"""The reference bundle: every kernel in plain PyTorch, readable rather than fast."""

from __future__ import annotations

from torch import Tensor

from sametoken.kernels.activation import reference as activation
from sametoken.kernels.attention import reference as attention
from sametoken.kernels.composed import ComposedKernels
from sametoken.kernels.gemm import eight_bit
from sametoken.kernels.gemm import reference as gemm
from sametoken.kernels.gemm.eight_bit import EightBitWeight
from sametoken.kernels.gemm.reference import PlainWeight
from sametoken.kernels.interface import (
    AttentionRows,
    AttentionShape,
    LayerKV,
    PackedWeight,
    QKNorm,
    RotaryTable,
)
from sametoken.kernels.norm_rope import reference as norm_rope
from sametoken.kernels.sampling import reference as sampling


class ReferenceKernels(ComposedKernels):
    """``Kernels`` in plain PyTorch, for any CPU; contracts are those of the protocol."""

    name = "reference"

    def require(self, shape: AttentionShape) -> None:
        """Every shape runs."""

    def pack(self, weight: Tensor) -> PlainWeight:
        return PlainWeight(weight.contiguous())

    def eight_bit(self, weight: PackedWeight) -> EightBitWeight:
        return eight_bit.quantize(_own(weight).matrix)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, EightBitWeight):
            return eight_bit.linear(x, weight, bias)
        return gemm.linear(x, _own(weight), bias)

    def logits(self, x: Tensor, weight: PackedWeight) -> Tensor:
        if isinstance(weight, EightBitWeight):
            return eight_bit.logits(x, weight)
        return gemm.logits(x, _own(weight))

    def embedding(self, token_ids: Tensor, weight: PackedWeight) -> Tensor:
        return gemm.embedding(token_ids, _own(weight))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rope.rms_norm(x, weight, eps)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rope.gated_rms_norm(x, gate, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm_rope.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.silu_mul(gate_up)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return activation.sigmoid_mul(x, gate)

    def gated_linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        return self.silu_mul(self.linear(x, weight))

    def rope_and_cache(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        rotary: RotaryTable,
        rows: AttentionRows,
        kv: LayerKV,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        return norm_rope.rope_and_cache(qkv, shape, rotary, rows, kv, qk_norm)

    def attention(
        self, q: Tensor, shape: AttentionShape, rows: AttentionRows, kv: LayerKV
    ) -> Tensor:
        return attention.attention(q, shape, rows, kv)

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        token_ids: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        return sampling.sample(logits, temperature, seeds, positions, token_ids, slots)


def _own(weight: PackedWeight) -> PlainWeight:
    assert isinstance(weight, PlainWeight), f"packed by another bundle: {type(weight).__name__}"
    return weight

"""The reference bundle: every kernel in plain PyTorch, readable rather than fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.activation import reference as activation
from sametoken.kernels.attention import reference as attention
from sametoken.kernels.composed import ComposedKernels
from sametoken.kernels.gemm import reference as gemm
from sametoken.kernels.gemm.fp8 import Fp8Weight, quantize
from sametoken.kernels.gemm.reference import MatrixWeight
from sametoken.kernels.interface import (
    AttentionRows,
    AttentionShape,
    LayerKV,
    QKNorm,
    RotaryTable,
)
from sametoken.kernels.norm_rope import reference as norm_rope
from sametoken.kernels.sampling import reference as sampling


@dataclass(frozen=True, slots=True)
class PlainWeight(MatrixWeight):
    """A weight as the checkpoint has it, as an ``UnquantizedWeight``."""

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if out_dtype is None:
            return gemm.product(x, self.matrix, bias)
        return gemm.product_fp32(x, self.matrix).to(out_dtype)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return activation.silu_mul(self.matmul(x))

    def rows(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.matrix)

    def quantize_fp8(self) -> Fp8Weight:
        return Fp8Weight(*quantize(self.matrix))


class ReferenceKernels(ComposedKernels):
    """``Kernels`` in plain PyTorch, for any CPU; contracts are those of the protocol."""

    name = "reference"

    def require(self, shape: AttentionShape) -> None:
        """Every shape runs."""

    def pack(self, weight: Tensor) -> PlainWeight:
        return PlainWeight(weight.contiguous())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rope.rms_norm(x, weight, eps)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rope.gated_rms_norm(x, gate, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm_rope.add_rms_norm(x, residual, weight, eps)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return activation.sigmoid_mul(x, gate)

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

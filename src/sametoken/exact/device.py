"""Gradients on a GPU: what every layer of a dense decoder runs has kernels for them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.exact.functions import derived
from sametoken.exact.kernels import DifferentiableKernels, DifferentiableWeight, RecordedKV
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, QKNorm, RotaryTable
from sametoken.ops.gradients.attention_triton import attention_gradients
from sametoken.ops.gradients.rows_triton import norm_gradients, rotary_gradients, silu_mul_gradient
from sametoken.ops.model.activation_triton import silu_mul
from sametoken.ops.model.norm_rope_triton import add_rms_norm_apart


@dataclass(frozen=True, slots=True)
class DeviceDifferentiableWeight(DifferentiableWeight):
    """Keeps gate and up for the backward pass: fused or not, kernels give the same bits."""

    def gated_matmul(self, x: Tensor) -> Tensor:
        """See ``Weight.gated_matmul``."""
        return derived(
            lambda gate_up: (silu_mul(gate_up), (gate_up,)),
            lambda gate_up, of: (silu_mul_gradient(gate_up, of),),
            self.matmul(x),
        )


class DeviceKernels(DifferentiableKernels):
    """``DifferentiableKernels`` over Triton's, with Triton's gradients of the frequent ones."""

    def pack(self, weight: Tensor) -> DeviceDifferentiableWeight:
        """See ``Packing.pack``; ``weight`` carries gradients to the parameters."""
        return DeviceDifferentiableWeight(self._kernels.pack(weight.detach()), weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Kernels.rms_norm``; over the last dimension."""
        return derived(
            lambda x, weight: (self._kernels.rms_norm(x, weight, eps), (x, weight)),
            lambda x, weight, of: norm_gradients(x, weight, eps, of),
            x,
            weight,
        )

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels.add_rms_norm``."""

        def run(
            x: Tensor, residual: Tensor, weight: Tensor
        ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
            out = add_rms_norm_apart(x, residual, weight, eps)
            return out, (out[1], weight)

        def gradients_of(
            total: Tensor, weight: Tensor, of: Tensor, of_total: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            by_total, by_weight = norm_gradients(total, weight, eps, of, of_total)
            return by_total, by_total, by_weight

        return derived(run, gradients_of, x, residual, weight)

    def rope_and_cache(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        rotary: RotaryTable,
        rows: AttentionRows,
        kv: LayerKV,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        """See ``Kernels.rope_and_cache``; keys and values are also kept with their gradients."""
        assert isinstance(kv, RecordedKV)
        weights = () if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight)

        def run(qkv: Tensor, *both: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            q = self._kernels.rope_and_cache(qkv, shape, rotary, rows, kv, qk_norm)
            return (q, *kv.read()), (qkv,)

        def gradients_of(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return rotary_gradients(qkv, shape, rotary, rows.positions, qk_norm, (q, k, v))

        q: Tensor
        q, *kv.written[:] = derived(run, gradients_of, qkv, *weights)
        return q

    def _attended(
        self, q: Tensor, shape: AttentionShape, rows: AttentionRows, kv: RecordedKV
    ) -> Tensor:
        runs = rows.runs
        assert runs is not None
        starts, longest = runs.starts, runs.max_rows
        assert starts is not None

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            out = self._kernels.attention(q, shape, rows, kv)
            return out, (q, k, v, out)

        def gradients_of(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, of: Tensor
        ) -> tuple[Tensor, ...]:
            return attention_gradients((q, k, v), out, of, shape, starts, longest)

        return derived(run, gradients_of, q, *kv.written)

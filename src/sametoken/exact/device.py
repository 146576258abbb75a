"""Gradients on a GPU: what layers of dense decoders and experts run has kernels for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.exact.functions import derived, gradients, product_gradients
from sametoken.exact.kernels import DifferentiableKernels, DifferentiableWeight, RecordedKV
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    QKNorm,
    RotaryTable,
    Routing,
)
from sametoken.ops.gradients.attention_triton import attention_gradients
from sametoken.ops.gradients.experts_triton import Activation, expert_gradients
from sametoken.ops.gradients.rows_triton import norm_gradients, rotary_gradients, silu_mul_gradient
from sametoken.ops.model.activation_triton import silu_mul
from sametoken.ops.model.moe import gate_scores, gate_weights
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.model.norm_triton import add_rms_norm_apart
from sametoken.ops.weight import Experts, GeluExperts, Weight


@dataclass(frozen=True, slots=True)
class DeviceDifferentiableWeight(DifferentiableWeight):
    """Keeps gate and up for the backward pass: fused or not, kernels give the same bits."""

    def gated_matmul(self, x: Tensor) -> Tensor:
        """See ``Weight.gated_matmul``."""

        def run(x: Tensor, matrix: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            gate_up = self.packed.matmul(x)
            return silu_mul(gate_up), (x, matrix, gate_up)

        def gradients_of(
            x: Tensor, matrix: Tensor, gate_up: Tensor, of: Tensor
        ) -> tuple[Tensor | None, ...]:
            return product_gradients(x, matrix, silu_mul_gradient(gate_up, of))

        return derived(run, gradients_of, x, self.matrix)


@dataclass(frozen=True, slots=True)
class DeviceExperts:
    """``StackedExperts`` with gradients; inner features are computed again for them.

    Attributes:
        gate_up: [E, 2 * I, H], gate first; [E, I, H] without gates.
        down: [E, H, I].
        form: GeluExperts, or None.
    """

    gate_up: Tensor
    down: Tensor
    form: GeluExperts | None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        out_dtype: torch.dtype | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:
        """See ``Experts``."""
        is_gated = self.gate_up.shape[1] != self.down.shape[2]
        gated: Activation = "gelu_mul" if self.form else "silu_mul"
        activation: Activation = gated if is_gated else "relu_squared"

        def run(
            x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            experts = StackedExperts(ExpertStack(gate_up), ExpertStack(down), self.form)
            out = experts(x, chosen, weights, out_dtype)
            return out, (x, chosen, weights, gate_up, down)

        def gradients_of(
            x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, of: Tensor
        ) -> tuple[Tensor | None, ...]:
            return expert_gradients(x, chosen, weights, gate_up, down, activation, of)

        out = derived(run, gradients_of, x, weights, self.gate_up, self.down)
        return out if beside is None else out + beside


class DeviceKernels(DifferentiableKernels):
    """``DifferentiableKernels`` over Triton's, with Triton's gradients of the frequent ones."""

    def pack(self, weight: Tensor) -> DeviceDifferentiableWeight:
        """See ``Packing.pack``; ``weight`` carries gradients to the parameters."""
        return DeviceDifferentiableWeight(self._kernels.pack(weight.detach()), weight)

    def _experts(
        self, gate_up: Sequence[Weight], down: Sequence[Weight], form: GeluExperts | None
    ) -> Experts:
        return DeviceExperts(_stacked(gate_up), _stacked(down), form)

    def moe_gate(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels.moe_gate``."""

        def run(logits: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
            chosen, weights = self._kernels.moe_gate(logits, routing, bias)
            return (chosen, weights), (logits, chosen)

        def gradients_of(
            logits: Tensor, chosen: Tensor, of_chosen: Tensor, of: Tensor
        ) -> list[Tensor | None]:
            def formula(logits: Tensor) -> Tensor:
                return gate_weights(gate_scores(logits, routing), chosen, routing)

            return gradients(formula, [logits], [True], [of])

        return derived(run, gradients_of, logits)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Kernels.rms_norm``; over the last dimension."""
        return derived(
            lambda x, weight: (self._kernels.rms_norm(x, weight, eps), (x, weight)),
            lambda x, weight, of: norm_gradients(x, weight, eps, of),
            x.contiguous(),
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

    def _rotated(
        self,
        run: Callable[..., tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        shape: AttentionShape,
        rotary: RotaryTable,
        rows: AttentionRows,
        qk_norm: QKNorm | None,
    ) -> tuple[Tensor, ...]:
        def gradients_of(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return rotary_gradients(qkv, shape, rotary, rows.positions, qk_norm, (q, k, v))

        return derived(lambda *inputs: (run(*inputs), inputs[:1]), gradients_of, *inputs)

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


def _stacked(weights: Sequence[Weight]) -> Tensor:
    return torch.stack([one.matrix for one in weights if isinstance(one, DifferentiableWeight)])

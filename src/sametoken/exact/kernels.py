"""The engine's kernels, differentiable: the same ones, called with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.exact.functions import embedded, packed_attention, product, recomputed
from sametoken.exact.recurrent import DifferentiablePass
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    Kernels,
    LayerKV,
    QKNorm,
    RotaryTable,
    Routing,
)
from sametoken.ops.layer import LayerParts
from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.moe import SeparateExperts, moe_gate
from sametoken.ops.model.norm_rope import add_rms_norm, normed_and_rotated, rms_norm
from sametoken.ops.model.recurrent.rule import Folded
from sametoken.ops.weight import (
    ClampedExperts,
    ExpertForm,
    Experts,
    GeluExperts,
    UnquantizedWeight,
    Weight,
)


@dataclass(frozen=True, slots=True)
class RecordedKV(LayerKV):
    """One layer's KV memory in a pass, and what was written to it as tensors with gradients.

    Attributes:
        lengths: of the packed sequences.
        places: [T] int64 each, the rows' blocks, and their offsets in them.
        written: keys and values [T, num_kv_heads, head_dim]; written by ``rope_and_cache``.
    """

    lengths: Sequence[int] = field(kw_only=True)
    places: tuple[Tensor, Tensor] = field(kw_only=True)
    written: list[Tensor] = field(default_factory=list)

    def read(self) -> tuple[Tensor, Tensor]:
        """Copies of the rows' keys and values: [T, num_kv_heads, head_dim]."""
        blocks, offsets = self.places
        return self.keys[blocks, :, offsets], self.values[blocks, :, offsets]


@dataclass(frozen=True, slots=True)
class DifferentiableWeight:
    """``UnquantizedWeight`` whose products carry gradients.

    Attributes:
        packed: the engine's weight, which computes every product.
        matrix: [N, K], the same values; gradients go to it.
    """

    packed: UnquantizedWeight
    matrix: Tensor

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.out_features

    @property
    def in_features(self) -> int:
        """K."""
        return self.packed.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of both copies."""
        return self.packed.nbytes + self.matrix.nbytes

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See ``Weight.matmul``."""
        return product(self.packed, x, self.matrix, bias, out_dtype)

    def gated_matmul(self, x: Tensor) -> Tensor:
        """See ``Weight.gated_matmul``."""
        return recomputed(
            lambda x, matrix: self.packed.gated_matmul(x),
            lambda x, matrix: silu_mul(x @ matrix.mT),
            x,
            self.matrix,
        )

    def rows(self, token_ids: Tensor) -> Tensor:
        """See ``UnquantizedWeight.rows``."""
        return embedded(self.packed.rows, token_ids, self.matrix)

    def quantize_fp8(self) -> NoReturn:
        """Refused: products of a target are exact."""
        raise UnsupportedError("fp8 products have no gradients here", "leave fp8 out")


_OTHERS = "use a family that docs/rollouts.md names"


class DifferentiableKernels:
    """The operations of dense decoders, hybrids and mixtures of experts, with gradients.

    Contracts are those of ``Kernels``. An operation that is not here is refused by name.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.name = kernels.name
        self.require, self.require_rule = kernels.require, kernels.require_rule

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(f"the operation {name} has no gradients", _OTHERS)

    def pack(self, weight: Tensor) -> DifferentiableWeight:
        """See ``Packing.pack``; ``weight`` carries gradients to the parameters."""
        return DifferentiableWeight(self._kernels.pack(weight.detach()), weight)

    def whole_layers(self, parts: Sequence[LayerParts | None]) -> None:
        """None: gradients go through a layer's operations one by one."""

    def pack_experts(
        self, gate_up: Sequence[Weight], down: Sequence[Weight], form: ExpertForm | None = None
    ) -> Experts:
        """See ``Packing.pack_experts``."""
        if isinstance(form, ClampedExperts):
            raise UnsupportedError("clamped experts have no gradients", _OTHERS)
        return self._experts(gate_up, down, form)

    def _experts(
        self, gate_up: Sequence[Weight], down: Sequence[Weight], form: GeluExperts | None
    ) -> Experts:
        """Of differentiable products, as CPU backends compose them."""
        return SeparateExperts(
            tuple(gate_up), tuple(down), self.relu_squared, gelu_mul=self.gelu_mul, form=form
        )

    def moe_gate(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels.moe_gate``: what CPU backends run is plain PyTorch."""
        return moe_gate(logits, routing, bias)

    def take_rows(self, states: Tensor, rows: Tensor | None) -> Tensor:
        """See ``Kernels.take_rows``."""
        return states if rows is None else states.index_select(0, rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Kernels.rms_norm``."""
        kernel = partial(self._kernels.rms_norm, eps=eps)
        return recomputed(kernel, partial(rms_norm, eps=eps), x, weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels.add_rms_norm``; the kernel gets copies, as it may write to both."""

        def kernel(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return self._kernels.add_rms_norm(x.clone(), residual.clone(), weight, eps)

        return recomputed(kernel, partial(add_rms_norm, eps=eps), x, residual, weight)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Kernels.gated_rms_norm``."""

        def formula(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
            heads = torch.unflatten(x, 1, (-1, weight.shape[0]))
            return rms_norm(heads, weight, eps).flatten(1) * F.silu(gate)

        return recomputed(partial(self._kernels.gated_rms_norm, eps=eps), formula, x, gate, weight)

    def gated_group_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float
    ) -> Tensor:
        """See ``Kernels.gated_group_norm``."""

        def formula(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
            groups = torch.unflatten(x * F.silu(gate), 1, (num_groups, -1))
            return rms_norm(groups, weight.view(num_groups, -1), eps).flatten(1)

        kernel = partial(self._kernels.gated_group_norm, num_groups=num_groups, eps=eps)
        return recomputed(kernel, formula, x, gate, weight)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """See ``Kernels.sigmoid_mul``."""
        return recomputed(
            self._kernels.sigmoid_mul, lambda x, gate: x * torch.sigmoid(gate), x, gate
        )

    def relu_squared(self, x: Tensor) -> Tensor:
        """See ``Kernels.relu_squared``."""
        return recomputed(self._kernels.relu_squared, lambda x: F.relu(x).square(), x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels.silu_mul``."""
        return recomputed(self._kernels.silu_mul, silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels.gelu_mul``."""
        return recomputed(self._kernels.gelu_mul, _gelu_mul, gate_up)

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        """See ``Kernels.soft_cap``."""
        kernel = partial(self._kernels.soft_cap, cap=cap)
        return recomputed(kernel, lambda logits: cap * torch.tanh(logits / cap), logits)

    def begin_pass(self, rows: AttentionRows, folded: Folded) -> DifferentiablePass:
        """See ``Kernels.begin_pass``."""
        return DifferentiablePass(self._kernels.begin_pass(rows, folded))

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

        def run(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            q = self._kernels.rope_and_cache(qkv, shape, rotary, rows, kv, qk_norm)
            return q, *kv.read()

        q, *kv.written[:] = self._rotated(run, (qkv, *weights), shape, rotary, rows, qk_norm)
        return q

    def _rotated(
        self,
        run: Callable[..., tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        shape: AttentionShape,
        rotary: RotaryTable,
        rows: AttentionRows,
        qk_norm: QKNorm | None,
    ) -> tuple[Tensor, ...]:
        """``run(*inputs)``, q, k and v, with the gradients of ``normed_and_rotated``.

        ``inputs`` are qkv, and the weights of q and k if normed.
        """

        def formula(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            norm = None if qk_norm is None else QKNorm(weights[0], weights[1], qk_norm.eps)
            return normed_and_rotated(qkv, shape, rotary, rows.positions, norm)

        return recomputed(run, formula, *inputs)

    def attention(
        self,
        q: Tensor,
        shape: AttentionShape,
        rows: AttentionRows,
        kv: LayerKV,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``Kernels.attention``."""
        assert isinstance(kv, RecordedKV)
        if sinks is not None:
            raise UnsupportedError("attention sinks have no gradients", _OTHERS)
        return self._attended(q, shape, rows, kv)

    def _attended(
        self, q: Tensor, shape: AttentionShape, rows: AttentionRows, kv: RecordedKV
    ) -> Tensor:
        return packed_attention(
            lambda q: self._kernels.attention(q, shape, rows, kv),
            (q, *kv.written),
            shape,
            kv.lengths,
        )


def differentiable(kernels: Kernels) -> Kernels:
    """Kernels with gradients, which refuse by name what they lack."""
    kind = DifferentiableKernels
    if kernels.name == "triton":
        # Only CUDA builds of torch come with Triton.
        from sametoken.exact.device import DeviceKernels as kind
    return cast("Kernels", kind(kernels))


def _gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up

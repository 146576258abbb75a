"""The reference backend: every kernel in plain PyTorch, readable rather than fast.

``ComposedKernels`` holds the operations that both CPU backends share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.ops.backend import AttentionRows, AttentionShape, Kernels, Norm, SampledRows
from sametoken.ops.layer import LayerParts, WholeLayers
from sametoken.ops.model import activation, moe, norm_rope
from sametoken.ops.model import embedding as embedding_reference
from sametoken.ops.model import partial_sum as partial_sum_op
from sametoken.ops.model.attention import reference as attention_op
from sametoken.ops.model.gemm import reference as gemm
from sametoken.ops.model.gemm.fp8 import Fp8Weight, quantize, rounded_by
from sametoken.ops.model.gemm.int4 import Int4Weight, expanded
from sametoken.ops.model.gemm.reference import MatrixWeight
from sametoken.ops.model.gemm.stacked import StackedWeight
from sametoken.ops.model.latent_attention import reference as latent_attention_op
from sametoken.ops.model.latent_attention.reference import PlainHeadWeights
from sametoken.ops.model.latent_attention.shape import LatentShape
from sametoken.ops.model.low_rank import AdaptedWeight, Room, RowAdapters, SeparateUpdates
from sametoken.ops.model.low_rank_experts import AdaptedSeparateExperts, ExpertSizes
from sametoken.ops.model.moe import SeparateExperts
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.rule import Folded, RecurrentPass, RecurrentRule
from sametoken.ops.sampling import logits_rules_reference as logits_rules
from sametoken.ops.sampling import sample as sampling
from sametoken.ops.sampling import truncation as truncation_op
from sametoken.ops.sampling.sample import make_keys
from sametoken.ops.weight import (
    BY_ROW,
    ExpertForm,
    Experts,
    Fp8Matrix,
    Int4Matrix,
    IntegerMatrix,
    RoundedRows,
    Rounding,
    UnquantizedWeight,
    Weight,
)


class ComposedKernels:
    """Operations of ``Kernels`` built from the others or from the references."""

    moe_gate = staticmethod(moe.moe_gate)
    apply_rules = staticmethod(logits_rules.apply_rules)
    truncate = staticmethod(truncation_op.truncate)
    partial_sum = staticmethod(partial_sum_op.partial_sum)

    def embed_beside(
        self: Kernels,
        token_ids: Tensor,
        embedding: UnquantizedWeight,
        embedding_norm: Norm,
        hidden: Tensor,
        hidden_norm: Norm,
    ) -> Tensor:
        return embedding_reference.embed_beside(
            self, token_ids, embedding, embedding_norm, hidden, hidden_norm
        )

    def rounding_rms_norm(
        self: Kernels,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        rounding: Rounding = BY_ROW,
    ) -> tuple[RoundedRows, Tensor]:
        if residual is None:
            normed, total = self.rms_norm(x, weight, eps), x
        else:
            normed, total = self.add_rms_norm(x, residual, weight, eps)
        return RoundedRows(*rounded_by(rounding, normed), normed.dtype), total

    def require_integer_experts(self) -> None:
        """Accept them."""

    def whole_layers(self, parts: Sequence[LayerParts | None]) -> WholeLayers | None:
        return None

    def stack(self: Kernels, weights: Sequence[Weight]) -> StackedWeight:
        return StackedWeight(tuple(weights), self.silu_mul)

    def adapt(
        self: Kernels, weight: Weight, sizes: Sequence[int], room: Room, rows: RowAdapters
    ) -> AdaptedWeight:
        updates = SeparateUpdates.of(self.pack, sizes, room)
        return AdaptedWeight(weight, updates, rows, self.silu_mul)

    def pack_experts(
        self: Kernels,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        form: ExpertForm | None = None,
    ) -> SeparateExperts:
        activations = (self.relu_squared, self.clamped_swiglu, self.gelu_mul)
        return SeparateExperts(tuple(gate_up), tuple(down), *activations, form)

    def adapt_experts(
        self: Kernels, experts: Experts, sizes: ExpertSizes, room: Room, rows: RowAdapters
    ) -> AdaptedSeparateExperts:
        assert isinstance(experts, SeparateExperts)
        own_rows = RowAdapters()
        parts = {one.name: getattr(experts, one.name) for one in fields(experts)}
        for name, outputs in (("gate_up", sizes.inputs), ("down", (sizes.hidden,))):
            parts[name] = tuple(self.adapt(one, outputs, room, own_rows) for one in parts[name])
        return AdaptedSeparateExperts(**parts, plain=experts, rows=rows, own_rows=own_rows)

    def require_rule(self, rule: RecurrentRule) -> None:
        """Accept every rule."""

    def begin_pass(self, rows: AttentionRows, folded: Folded) -> RecurrentPass:
        return RowByRowPass.begin(rows, folded)

    def take_rows(self, states: Tensor, rows: Tensor | None) -> Tensor:
        return states if rows is None else states[rows]

    def token_keys(
        self: Kernels, logits: Tensor, temperature: Tensor, seeds: Tensor, rows: SampledRows
    ) -> Tensor:
        tokens = self.sample(logits, temperature[rows.slots], seeds[rows.slots], rows.positions + 1)
        # Only NaN and -inf still matter in the compared values, and noise changes neither.
        values = logits.gather(1, tokens[:, None])
        values.masked_fill_(logits.amax(dim=-1, keepdim=True).isnan(), torch.nan)
        return make_keys(values, tokens[:, None])


@dataclass(frozen=True, slots=True)
class PlainWeight(MatrixWeight):
    """``UnquantizedWeight`` in the checkpoint's layout."""

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

    rms_norm = staticmethod(norm_rope.rms_norm)
    gated_rms_norm = staticmethod(norm_rope.gated_rms_norm)
    add_rms_norm = staticmethod(norm_rope.add_rms_norm)
    gated_group_norm = staticmethod(norm_rope.gated_group_norm)
    sigmoid_mul = staticmethod(activation.sigmoid_mul)
    gelu_mul = staticmethod(activation.gelu_mul)
    clamped_swiglu = staticmethod(activation.clamped_swiglu)
    soft_cap = staticmethod(activation.soft_cap)
    silu_mul = staticmethod(activation.silu_mul)
    relu_squared = staticmethod(activation.relu_squared)
    rope_and_cache = staticmethod(norm_rope.rope_and_cache)
    attention = staticmethod(attention_op.attention)
    latent_rope_and_cache = staticmethod(latent_attention_op.rope_and_cache)
    latent_attention = staticmethod(latent_attention_op.attention)
    sample = staticmethod(sampling.sample)

    def require(self, shape: AttentionShape) -> None:
        """Accept every shape."""

    def pack(self, weight: Tensor) -> PlainWeight:
        return PlainWeight(weight.contiguous())

    def pack_fp8(self, matrix: Fp8Matrix, dtype: torch.dtype) -> Fp8Weight:
        return Fp8Weight(matrix.values, matrix.scale, matrix.rounding)

    def pack_int4(self, matrix: Int4Matrix, dtype: torch.dtype) -> Int4Weight:
        return Int4Weight(matrix)

    def pack_integers(self, matrix: IntegerMatrix, dtype: torch.dtype) -> PlainWeight:
        """Expanded, and rounded to ``dtype``."""
        return self.pack(expanded(matrix).to(dtype))

    def require_latent(self, shape: LatentShape) -> None:
        """Accept every shape."""

    def pack_heads(self, weight: Tensor) -> PlainHeadWeights:
        return PlainHeadWeights(weight.contiguous())

"""The Triton bundle: every kernel on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.kernels.activation import triton as activation
from sametoken.kernels.attention import triton as attention
from sametoken.kernels.embedding import triton as embedding_triton
from sametoken.kernels.experts import triton as experts_triton
from sametoken.kernels.experts.triton import StackedExperts
from sametoken.kernels.gemm import eight_bit_triton
from sametoken.kernels.gemm import triton as gemm
from sametoken.kernels.gemm.eight_bit import EightBitWeight, quantize
from sametoken.kernels.gemm.proof import ProvenTable
from sametoken.kernels.gemm.selfcheck import GemmReport
from sametoken.kernels.gemm.tuning import TuningTable, load_table
from sametoken.kernels.interface import (
    AttentionRows,
    AttentionShape,
    CommittedTokens,
    Cuts,
    LayerKV,
    LogitsRules,
    Norm,
    PackedExperts,
    PackedWeight,
    QKNorm,
    RotaryTable,
    SampledRows,
)
from sametoken.kernels.logits_rules import triton as logits_rules
from sametoken.kernels.norm_rope import triton as norm_rope
from sametoken.kernels.partial_sum import triton as partial_sum
from sametoken.kernels.recurrent import triton as recurrent
from sametoken.kernels.recurrent.rule import Folded, RecurrentRule
from sametoken.kernels.sampling import triton as sampling
from sametoken.kernels.truncation import triton as truncation

MAX_HEAD_DIM = 256


class TritonKernels:
    """``Kernels`` in Triton; contracts are those of the protocol.

    Args:
        table: which GEMM serves which shape; by default the one measured on this device.
    """

    name = "triton"

    def __init__(self, table: TuningTable | None = None) -> None:
        self.table = ProvenTable(table or load_table(torch.cuda.get_device_name()))
        # Of each shape one matrix that is still in use.
        self._matrices: WeakValueDictionary[tuple[int, ...], Tensor] = WeakValueDictionary()

    def prove(self, row_counts: Iterable[int]) -> tuple[GemmReport, ...]:
        """Compare the chosen GEMMs with the canonical one on this chip, for packed weights.

        The vendor's library serves a row count only once it has been proven here.

        Args:
            row_counts: the row counts that captured steps will run.
        """
        return self.table.prove(self._matrices.values(), tuple(row_counts))

    def require(self, shape: AttentionShape) -> None:
        if shape.head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"head_dim {shape.head_dim} is above {MAX_HEAD_DIM}", "use device 'cpu'"
            )

    def pack(self, weight: Tensor) -> gemm.DeviceWeight:
        matrix = weight.contiguous()
        self._matrices.setdefault(tuple(matrix.shape), matrix)
        return gemm.DeviceWeight(matrix)

    def eight_bit(self, weight: PackedWeight) -> EightBitWeight:
        return quantize(_own(weight).matrix)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, EightBitWeight):
            return eight_bit_triton.linear(x, weight, bias)
        return gemm.linear(x, _own(weight), bias, table=self.table)

    def logits(self, x: Tensor, weight: PackedWeight) -> Tensor:
        if isinstance(weight, EightBitWeight):
            return eight_bit_triton.logits(x, weight)
        return gemm.logits(x, _own(weight), table=self.table)

    def gated_linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        if isinstance(weight, EightBitWeight):
            return eight_bit_triton.linear_silu_mul(x, weight)
        return gemm.linear_silu_mul(x, _own(weight), table=self.table)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return activation.sigmoid_mul(x, gate)

    def embedding(self, token_ids: Tensor, weight: PackedWeight) -> Tensor:
        return embedding_triton.embedding(token_ids, _own(weight).matrix)

    def take_rows(self, states: Tensor, rows: Tensor | None) -> Tensor:
        return states if rows is None else embedding_triton.embedding(rows, states)

    def partial_sum(
        self, partials: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        return partial_sum.partial_sum(partials, dtype, bias)

    def embed_beside(
        self,
        token_ids: Tensor,
        embedding: PackedWeight,
        embedding_norm: Norm,
        hidden: Tensor,
        hidden_norm: Norm,
    ) -> Tensor:
        matrix = _own(embedding).matrix
        return embedding_triton.embed_beside(token_ids, matrix, embedding_norm, hidden, hidden_norm)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rope.rms_norm(x, weight, eps)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rope.gated_rms_norm(x, gate, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm_rope.add_rms_norm(x, residual, weight, eps)

    def pack_experts(
        self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight]
    ) -> StackedExperts:
        stacks = (torch.stack([_own(one).matrix for one in each]) for each in (gate_up, down))
        return StackedExperts(*stacks)

    def route(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        return experts_triton.route(logits, top_k, normalise)

    def mix_experts(
        self, x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        assert isinstance(experts, StackedExperts)
        return experts_triton.mix(x, experts, chosen, weights)

    def mix_expert_parts(
        self, x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        assert isinstance(experts, StackedExperts)
        return experts_triton.mix(x, experts, chosen, weights, torch.float32)

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

    def require_rule(self, rule: RecurrentRule) -> None:
        recurrent.require_rule(rule)

    def begin_pass(self, rows: AttentionRows, folded: Folded) -> recurrent.TritonPass:
        return recurrent.TritonPass.begin(rows, folded)

    def apply_rules(
        self, logits: Tensor, rows: SampledRows, committed: CommittedTokens, rules: LogitsRules
    ) -> None:
        logits_rules.apply_rules(logits, rows, committed, rules)

    def truncate(self, logits: Tensor, slots: Tensor, cuts: Cuts) -> None:
        truncation.truncate(logits, slots, cuts)

    def token_keys(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, rows: SampledRows
    ) -> Tensor:
        return sampling.token_keys(logits, temperature, seeds, rows)

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


def _own(weight: PackedWeight) -> gemm.DeviceWeight:
    assert isinstance(weight, gemm.DeviceWeight), f"packed by {type(weight).__name__}"
    return weight

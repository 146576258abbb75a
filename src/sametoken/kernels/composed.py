"""Operations that every CPU bundle composes of its other ones, or takes from the references."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sametoken.kernels.embedding import reference as embedding_reference
from sametoken.kernels.experts import reference as experts_reference
from sametoken.kernels.experts.reference import SeparateExperts
from sametoken.kernels.interface import (
    CommittedTokens,
    Cuts,
    Kernels,
    LogitsRules,
    Norm,
    PackedExperts,
    PackedWeight,
    SampledRows,
)
from sametoken.kernels.logits_rules import reference as logits_rules
from sametoken.kernels.truncation import reference as truncation


class ComposedKernels:
    """A part of ``Kernels`` over the rest; contracts are those of the protocol."""

    def embed_beside(
        self: Kernels,
        token_ids: Tensor,
        embedding: PackedWeight,
        embedding_norm: Norm,
        hidden: Tensor,
        hidden_norm: Norm,
    ) -> Tensor:
        return embedding_reference.embed_beside(
            self, token_ids, embedding, embedding_norm, hidden, hidden_norm
        )

    def pack_experts(
        self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight]
    ) -> SeparateExperts:
        return SeparateExperts(tuple(gate_up), tuple(down))

    def route(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        return experts_reference.route(logits, top_k, normalise)

    def mix_experts(
        self: Kernels, x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        return experts_reference.mix(self, x, experts, chosen, weights)

    def mix_expert_parts(
        self: Kernels, x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        return experts_reference.mix_parts(self, x, experts, chosen, weights)

    def apply_rules(
        self, logits: Tensor, rows: SampledRows, committed: CommittedTokens, rules: LogitsRules
    ) -> None:
        logits_rules.apply_rules(logits, rows, committed, rules)

    def truncate(self, logits: Tensor, slots: Tensor, cuts: Cuts) -> None:
        truncation.truncate(logits, slots, cuts)

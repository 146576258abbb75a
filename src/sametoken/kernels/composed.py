"""Operations that every CPU bundle composes of its other ones, or takes from the references."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.kernels.embedding import reference as embedding_reference
from sametoken.kernels.experts import reference as experts_reference
from sametoken.kernels.experts.reference import SeparateExperts
from sametoken.kernels.interface import (
    AttentionRows,
    Cuts,
    Kernels,
    Norm,
    SampledRows,
)
from sametoken.kernels.logits_rules import reference as logits_rules
from sametoken.kernels.logits_rules.types import CommittedTokens, LogitsRules
from sametoken.kernels.partial_sum import reference as partial_sum
from sametoken.kernels.recurrent.row_by_row import RowByRowPass
from sametoken.kernels.recurrent.rule import Folded, RecurrentPass, RecurrentRule
from sametoken.kernels.sampling.keys import make_keys
from sametoken.kernels.truncation import reference as truncation
from sametoken.kernels.weight import UnquantizedWeight, Weight


class ComposedKernels:
    """A part of ``Kernels`` over the rest; contracts are those of the protocol."""

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

    def pack_experts(self, gate_up: Sequence[Weight], down: Sequence[Weight]) -> SeparateExperts:
        return SeparateExperts(tuple(gate_up), tuple(down))

    def route(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        return experts_reference.route(logits, top_k, normalise)

    def apply_rules(
        self, logits: Tensor, rows: SampledRows, committed: CommittedTokens, rules: LogitsRules
    ) -> None:
        logits_rules.apply_rules(logits, rows, committed, rules)

    def truncate(self, logits: Tensor, slots: Tensor, cuts: Cuts) -> None:
        truncation.truncate(logits, slots, cuts)

    def require_rule(self, rule: RecurrentRule) -> None:
        """Every rule runs."""

    def begin_pass(self, rows: AttentionRows, folded: Folded) -> RecurrentPass:
        return RowByRowPass.begin(rows, folded)

    def take_rows(self, states: Tensor, rows: Tensor | None) -> Tensor:
        return states if rows is None else states[rows]

    def partial_sum(
        self, partials: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        return partial_sum.partial_sum(partials, dtype, bias)

    def token_keys(
        self: Kernels, logits: Tensor, temperature: Tensor, seeds: Tensor, rows: SampledRows
    ) -> Tensor:
        tokens = self.sample(logits, temperature[rows.slots], seeds[rows.slots], rows.positions + 1)
        # Of the values compared only NaN and -inf matter any more, which noise leaves as they are.
        values = logits.gather(1, tokens[:, None])
        values.masked_fill_(logits.amax(dim=-1, keepdim=True).isnan(), torch.nan)
        return make_keys(values, tokens[:, None])

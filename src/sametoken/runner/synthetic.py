"""Synthetic acceptance in a captured step: real logits, drawn verdicts. For measuring only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.state.padded import (
    Chances,
    Judgement,
    PaddedInputs,
    PaddedLengths,
    judge,
    judge_and_commit,
)
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences


@dataclass(frozen=True, slots=True)
class SyntheticJudge:
    """Accepts drafts at given rates, whatever the target says.

    Attributes:
        rates: [k] fp32, conditional on the draft before being accepted.
        table: whose seeds key the draws.
    """

    rates: Tensor
    table: SamplingTable

    def __call__(
        self, sequences: Sequences, keys: Tensor, x: PaddedInputs, window: int
    ) -> tuple[Judgement, PaddedLengths]:
        """Judge by chance, and commit."""
        return judge_and_commit(sequences, keys, x, window, self._chances)

    def verdict(self, keys: Tensor, x: PaddedInputs, window: int) -> Judgement:
        """Judge by chance, and commit nothing."""
        return judge(keys, x, window, self._chances)

    @property
    def _chances(self) -> Chances:
        return Chances(self.rates, self.table.seed)

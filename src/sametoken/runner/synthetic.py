"""Synthetic acceptance in a captured step: real logits, drawn verdicts. For measuring only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.state.padded import Judgement, PaddedInputs, PaddedLengths, commit, judge
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.verification.synthetic import synthetic_accepted


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
        """Judge by chance, then commit."""
        verdict = self.verdict(keys, x, window)
        return verdict, commit(sequences, x, verdict.num_accepted, verdict.next_token)

    def verdict(self, keys: Tensor, x: PaddedInputs, window: int) -> Judgement:
        """Judge as ``kernels.commit.judge`` does, then replace the verdict by the drawn one."""
        judged = judge(keys, x, window)
        seeds = self.table.seed[x.slots]
        accepted = synthetic_accepted(self.rates, seeds, x.num_tokens, x.num_drafts)
        accepted = torch.where(judged.poisoned | ~x.samples, 0, accepted)
        # What commit stores of an accepted row is its draft: the next row's token.
        following = x.token_ids.view(x.slots.shape[0], -1).roll(-1, dims=1)[:, :window]
        offset = torch.arange(window, device=accepted.device)
        tokens = torch.where(offset < accepted[:, None], following, judged.tokens)
        next_token = tokens.gather(1, accepted[:, None]).squeeze(1)
        return replace(judged, tokens=tokens, num_accepted=accepted, next_token=next_token)

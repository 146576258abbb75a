"""What a step needs of a verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.core.plan import Admission
from sametoken.state.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Candidates of R positions, to be turned into ``PositionLogprobs`` by the host.

    Attributes:
        owner: [R] int64, the plan row of each position; ascending.
        chosen_ids, chosen_logprobs, chosen_ranks: [R] int64, fp32, int64 (rank from 1).
        top_ids, top_logprobs: [R, N] int64, fp32, best first; N is the most that any
            request of the step asked for.
        num_top: [R] int64, how many of the N the position's request asked for.
    """

    owner: Tensor
    chosen_ids: Tensor
    chosen_logprobs: Tensor
    chosen_ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    num_top: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of a step's windows. B plan rows, L logits rows.

    Attributes:
        num_accepted: [B] int64, accepted drafts, 0..num_drafts; 0 where nothing is sampled.
        next_token: [B] int64, the corrected or bonus token; a valid id for every row, read
            only for rows that sample.
        tokens: [L] int64, the target's own token at every window row; the first
            ``num_accepted + 1`` of a window are emitted.
        poisoned: [B] bool, NaN in the logits of a row that decided, 0..num_accepted, or no
            token allowed there. What rejected rows hold must not matter.
        stuck: [B] int64, why no token was allowed (``Stuck``); these are poisoned too.
        logprobs: for every window row of the requests that asked (the host keeps those of
            emitted tokens), or None if no request of the step asked.
    """

    num_accepted: Tensor
    next_token: Tensor
    tokens: Tensor
    poisoned: Tensor
    stuck: Tensor
    logprobs: TokenLogprobs | None = None


class Verifier(Protocol):
    """Chooses the target's token at every window row and accepts drafts equal to it."""

    def admit(self, admission: Admission) -> None:
        """Take up a slot's sampling parameters, replacing its former request's."""
        ...

    def judge(self, logits: Tensor, x: StepInputs) -> Verdict:
        """Judge the drafts of the step's windows.

        Args:
            logits: [L, V] fp32, one row per ``x.logits_indices``; may be overwritten.
            x: the step's inputs; a draft is the token of the next row of its window.
        """
        ...

    def score_prompt(
        self, hidden: Tensor, x: StepInputs, compute_logits: Callable[[Tensor], Tensor]
    ) -> TokenLogprobs | None:
        """Log-probabilities of prompt tokens whose predecessor row is in this step.

        None, at no cost, unless a request of the step asked for ``prompt_logprobs``.

        Args:
            hidden: [T, hidden] of the step's flat rows, after the final norm.
            x: the step's inputs.
            compute_logits: [L, hidden] to [L, V] fp32.
        """
        ...

"""One verdict for several ranks: rank 0 judges, and every rank commits what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sametoken.core.plan import Admission
from sametoken.layers.parallel import TensorParallel
from sametoken.state.inputs import StepInputs
from sametoken.verification.base import TokenLogprobs, Verdict, Verifier


class SharedVerifier:
    """``Verifier`` whose verdict is rank 0's.

    What decides lengths and tokens is broadcast, ``num_accepted`` and ``next_token``; the
    rest of a verdict is for the host, which reads rank 0 alone.

    Args:
        inner: judges; on the other ranks an ``Unjudging``.
        parallel: the ranks.
    """

    def __init__(self, inner: Verifier, parallel: TensorParallel) -> None:
        self._inner = inner
        self._parallel = parallel

    def admit(self, admission: Admission) -> None:
        """Take up a slot's sampling parameters."""
        self._inner.admit(admission)

    def judge(self, logits: Tensor, x: StepInputs) -> Verdict:
        """Rank 0's judgement, on every rank."""
        verdict = self._inner.judge(logits, x)
        decided = torch.stack((verdict.num_accepted, verdict.next_token))
        num_accepted, next_token = self._parallel.broadcast(decided).unbind(0)
        return replace(verdict, num_accepted=num_accepted, next_token=next_token)

    def score_prompt(
        self, hidden: Tensor, x: StepInputs, compute_logits: Callable[[Tensor], Tensor]
    ) -> TokenLogprobs | None:
        """As ``inner`` scores it; every rank takes part in computing the logits."""
        return self._inner.score_prompt(hidden, x, compute_logits)


class Unjudging:
    """Keeps a rank's part in verification other than the verdict.

    Args:
        inner: knows which rows of a prompt are to be scored.
    """

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner

    def admit(self, admission: Admission) -> None:
        """Take up a slot's sampling parameters; grammars are for whoever judges."""
        self._inner.admit(replace(admission, grammar=None))

    def judge(self, logits: Tensor, x: StepInputs) -> Verdict:
        """A verdict that says nothing, to be replaced."""
        nothing = torch.zeros_like(x.slots)
        tokens = torch.zeros_like(x.logits_indices)
        return Verdict(nothing, nothing, tokens, nothing.bool(), nothing)

    def score_prompt(
        self, hidden: Tensor, x: StepInputs, compute_logits: Callable[[Tensor], Tensor]
    ) -> TokenLogprobs | None:
        """None, once this rank's part of the logits has been computed."""
        self._inner.score_prompt(hidden, x, compute_logits)
        return None


def share_verifier(verifier: Verifier, parallel: TensorParallel) -> Verifier:
    """A rank's verifier: rank 0's decides for all."""
    if parallel.size == 1:
        return verifier
    return SharedVerifier(verifier if parallel.rank == 0 else Unjudging(verifier), parallel)

"""One verdict for all ranks, and prompts that all of them score."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from helpers.thread_ranks import run_ranks
from sametoken.core.plan import Admission
from sametoken.core.sampling_params import SamplingParams
from sametoken.layers.parallel import ALONE
from sametoken.verification.base import Verdict
from sametoken.verification.shared import SharedVerifier, Unjudging, share_verifier

X = SimpleNamespace(slots=torch.tensor([4, 2]), logits_indices=torch.tensor([0, 1, 2]))


class Opinion:
    """A verifier that says what its rank would."""

    def __init__(self, rank: int) -> None:
        self.rank, self.admitted, self.asked = rank, [], 0

    def admit(self, admission):
        self.admitted.append(admission)

    def judge(self, logits, x):
        own = torch.full_like(x.slots, self.rank)
        return Verdict(own, own + 10, own, own.bool(), own.bool())

    def score_prompt(self, hidden, x, compute_logits):
        self.asked += 1
        compute_logits(hidden)
        return "scores"


def test_every_rank_commits_what_rank_0_decides():
    def run(parallel):
        return SharedVerifier(Opinion(parallel.rank), parallel).judge(torch.zeros(3, 5), X)

    for rank, verdict in enumerate(run_ranks(3, run)):
        assert verdict.num_accepted.tolist() == [0, 0]
        assert verdict.next_token.tolist() == [10, 10]
        assert verdict.tokens.tolist() == [rank, rank]


def test_other_ranks_judge_nothing_and_keep_no_grammars():
    def run(parallel):
        inner = Opinion(parallel.rank)
        verifier = share_verifier(inner, parallel)
        verifier.admit(Admission(0, (1,), 0, SamplingParams(seed=0), grammar=object()))
        verdict = verifier.judge(torch.zeros(3, 5), X)
        calls = []
        scores = verifier.score_prompt(torch.zeros(1), X, calls.append)
        return verdict, inner.admitted[0].grammar is None, scores, len(calls)

    (first, *rest), (second, *others) = run_ranks(2, run)
    assert first.next_token.tolist() == second.next_token.tolist() == [10, 10]
    assert second.tokens.shape == (3,)
    assert rest == [False, "scores", 1]
    # Scoring takes logits, and those take every rank.
    assert others == [True, None, 1]


def test_one_rank_verifies_by_itself():
    inner = Opinion(0)
    assert share_verifier(inner, ALONE) is inner
    assert Unjudging(inner).judge(torch.zeros(3, 5), X).next_token.tolist() == [0, 0]

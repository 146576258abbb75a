"""Captured steps draw the verdicts that eager ones draw, from the same logits."""

from __future__ import annotations

import pytest
import torch

from sametoken.core.plan import PlanRow, StepPlan
from sametoken.kernels.outcome import SOUND
from sametoken.kernels.reference import ReferenceKernels
from sametoken.kernels.sampling.triton import greedy_keys
from sametoken.runner.synthetic import SyntheticJudge
from sametoken.state.inputs import stage
from sametoken.state.padded import stage_windows
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.verification.keyed import KeyedVerifier
from sametoken.verification.synthetic import SyntheticVerifier, conditional_rates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, K, VOCABULARY = 5, 3, 40


def scene() -> tuple[Sequences, SamplingTable]:
    """Slots with random tokens, random drafts and seeds of their own, all decoding."""
    sequences = Sequences.allocate(
        max_num_seqs=SLOTS,
        max_len=64,
        num_drafts=K,
        block_size=4,
        reserved_block=99,
        device=DEVICE,
    )
    generator = torch.Generator().manual_seed(0)
    for held in (sequences.token_ids, sequences.draft_ids):
        held.copy_(torch.randint(VOCABULARY, held.shape, generator=generator))
    sequences.num_tokens[:SLOTS] = torch.arange(9, 9 + SLOTS)
    sequences.num_computed[:SLOTS] = torch.arange(8, 8 + SLOTS)
    sequences.num_drafts[:SLOTS] = torch.tensor([3, 3, 0, 2, 3])
    table = SamplingTable.allocate(SLOTS, DEVICE)
    table.seed.copy_(torch.randint(2**62, table.seed.shape, generator=generator))
    return sequences, table


@pytest.mark.parametrize(
    ("rates", "total"), [((1.0, 1.0, 1.0), 7), ((0.8, 0.5, 0.3), 3), ((0.0, 0.0, 0.0), 0)]
)
def test_the_verdicts_are_those_of_eager_steps(rates, total):
    sequences, table = scene()
    rates = conditional_rates(rates, DEVICE)
    plan = [PlanRow(slot, 1, limit, True) for slot, limit in ((4, 3), (0, 3), (2, 3), (3, 1))]
    columns = [(row.slot, row.draft_limit, 1) for row in plan] + [(SLOTS, 0, 0)]
    x = stage_windows(sequences, *torch.tensor(columns, device=DEVICE).T.contiguous(), K + 1)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(columns), K + 1, VOCABULARY, generator=generator).to(DEVICE)
    eager = stage(sequences, StepPlan(0, rows=tuple(plan)))
    of_windows = torch.arange(K + 1, device=DEVICE) <= x.num_drafts[: len(plan), None]
    keyed = KeyedVerifier(ReferenceKernels(), sequences, table)
    expected = SyntheticVerifier(keyed, table, rates).judge(logits[: len(plan)][of_windows], eager)

    judge = SyntheticJudge(rates, table)
    keys = greedy_keys(logits.flatten(0, 1))
    alone = judge.verdict(keys, x, K + 1)
    verdict, lengths = judge(sequences, keys, x, K + 1)
    for found in (alone, verdict):
        for name in ("num_accepted", "next_token"):
            own = getattr(found, name)
            assert torch.equal(own[: len(plan)], getattr(expected, name)), name
            assert not own[len(plan) :].any()
        assert torch.equal(found.faults[: len(plan)] != SOUND, expected.poisoned)
        assert torch.equal(found.tokens[: len(plan)][of_windows], expected.tokens)
    accepted = expected.num_accepted
    assert torch.equal(lengths.num_tokens[: len(plan)], eager.num_tokens + accepted + 1)
    assert torch.equal(sequences.num_tokens[eager.slots], eager.num_tokens + accepted + 1)
    assert int(accepted.sum()) == total

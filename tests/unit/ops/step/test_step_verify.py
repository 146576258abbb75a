"""Verification: the target's distribution whatever is drafted, and synthetic acceptance."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.sampling import sample as reference
from sametoken.ops.step import compact
from sametoken.ops.step.reference import verify, write_tables
from sametoken.ops.step.types import Chances, LayoutTable
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.state.slots import admit
from sametoken.types.layout import StepLayout
from sametoken.types.plan import Admission, ScheduledRequest, StepPlan
from sametoken.types.sampling_params import SamplingParams

VOCAB_SIZE = 8
NUM_REQUESTS = 400
NUM_POSITIONS = 50
NUM_DRAFTS = 3
TEMPERATURE = 0.7


def random_model(seed):
    """Logits of the next token by the last one: a Markov chain, [V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)


TARGET = random_model(11)
SIMILAR = TARGET + 0.5 * random_model(12)


def no_drafts(last, positions, seeds):
    return torch.zeros((last.shape[0], 0), dtype=torch.int64)


def fixed_drafts(last, positions, seeds):
    return torch.tensor([[5, 1, 6]]).expand(last.shape[0], -1)


def coupled_drafts(last, positions, seeds):
    """A similar model that samples with the target's own noise."""
    chain = []
    for ahead in range(NUM_DRAFTS):
        temperature = torch.full((last.shape[0],), TEMPERATURE)
        last = reference.sample(SIMILAR[last], temperature, seeds, positions + ahead)
        chain.append(last)
    return torch.stack(chain, dim=1)


def generate(drafter, num_requests=NUM_REQUESTS, num_positions=NUM_POSITIONS, **parameters):
    """Prompt token and emitted tokens of each request, and how many drafts were accepted."""
    cpu = torch.device("cpu")
    sequences = Sequences.allocate(
        max_num_seqs=num_requests,
        max_len=num_positions + 2 * NUM_DRAFTS + 2,
        num_drafts=NUM_DRAFTS,
        block_size=16,
        reserved_block=0,
        device=cpu,
    )
    table = SamplingTable.allocate(num_requests, cpu)
    kernels = ReferenceKernels()
    first_seed = parameters.pop("first_seed", 1000)
    for slot in range(num_requests):
        params = SamplingParams(temperature=TEMPERATURE, seed=first_seed + slot, **parameters)
        admission = Admission(slot, (slot % VOCAB_SIZE,), 0, params)
        write_tables(admit(sequences, admission) + table.admit(admission))

    num_accepted = 0
    while True:
        slots = (sequences.num_tokens[:-1] <= num_positions).nonzero().squeeze(1)
        if not slots.numel():
            return sequences.token_ids[:-1, : num_positions + 1].clone(), num_accepted
        num_tokens = sequences.num_tokens[slots]
        last = sequences.token_ids[slots, num_tokens - 1]
        drafts = drafter(last, num_tokens, table.seed[slots])
        sequences.draft_ids[slots, : drafts.shape[1]] = drafts
        sequences.num_drafts[slots] = drafts.shape[1]
        rows = tuple(ScheduledRequest(slot, 1, NUM_DRAFTS, samples=True) for slot in slots.tolist())
        layout = StepLayout.of(
            StepPlan(0, requests=rows), compact.known_drafts(sequences, slots.tolist())
        )
        columns = layout.table(layout.shape, num_requests, 0)
        x = compact.prepare_inputs(sequences, LayoutTable(torch.tensor(columns), layout.shape))
        logits = TARGET[x.token_ids]
        kernels.apply_rules(logits, x.sampled, sequences, table.rules)
        kernels.truncate(logits, x.sampled.slots, table.truncation)
        keys = kernels.token_keys(logits, table.temperature, table.seed, x.sampled)
        verified = compact.verify(keys, x)
        compact.commit(sequences, x, verified.num_accepted, verified.next_token)
        num_accepted += int(verified.num_accepted.sum())


@pytest.fixture(scope="module")
def runs():
    """Of some of the requests of ``plain``."""
    return {drafter: generate(drafter, 40) for drafter in (fixed_drafts, coupled_drafts)}


@pytest.fixture(scope="module")
def plain():
    return generate(no_drafts)[0]


def test_emitted_tokens_follow_the_softmax_of_the_target(plain):
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    ones = torch.ones(NUM_REQUESTS * NUM_POSITIONS, dtype=torch.float64)
    counts.index_put_((plain[:, :-1].flatten(), plain[:, 1:].flatten()), ones, accumulate=True)
    assert counts.sum() == 20_000
    expected = (TARGET.double() / TEMPERATURE).softmax(-1) * counts.sum(-1, keepdim=True)
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor(VOCAB_SIZE * (VOCAB_SIZE - 1), dtype=torch.float64)
    p_value = torch.special.gammaincc(degrees / 2, statistic / 2).item()
    assert p_value > 1e-4


@pytest.mark.parametrize("drafter", [fixed_drafts, coupled_drafts])
def test_drafts_never_change_a_sampled_token(drafter, plain, runs):
    tokens, num_accepted = runs[drafter]
    assert torch.equal(tokens, plain[:40])
    assert num_accepted > 0


def test_coupled_drafts_are_accepted_far_more_often_than_fixed_ones(runs):
    assert runs[coupled_drafts][1] > 2 * runs[fixed_drafts][1]


@pytest.mark.parametrize("drafter", [fixed_drafts, coupled_drafts])
def test_drafts_never_change_a_token_under_penalties_and_cuts(drafter):
    parameters = {
        "frequency_penalty": 0.01,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.05,
        "top_p": 0.95,
        "min_p": 0.01,
    }
    tokens, num_accepted = generate(drafter, 16, 40, **parameters)
    assert torch.equal(tokens, generate(no_drafts, 16, 40, **parameters)[0])
    assert num_accepted > 0


def test_other_seeds_give_other_streams(plain):
    other = generate(no_drafts, 40, first_seed=5000)[0]
    same = (other[:, 1:] == plain[:40, 1:]).double().mean()
    assert same < 0.5
    # Requests that began with one prompt differ among themselves too.
    assert not torch.equal(plain[0, 1:], plain[VOCAB_SIZE, 1:])


def accepted(unconditional, seeds, positions, num_drafts) -> torch.Tensor:
    """num_accepted of a window for each seed, whose target agrees with no draft."""
    count, k = len(seeds), len(unconditional)
    x = SimpleNamespace(
        slots=torch.arange(count),
        samples=torch.ones(count, dtype=torch.bool),
        num_tokens=positions,
        num_drafts=num_drafts,
        window_starts=torch.arange(count + 1) * (k + 1),
        sampled=SimpleNamespace(token_ids=torch.ones(count * (k + 1), dtype=torch.int64)),
    )
    keys = torch.full((count * (k + 1), 1), 0xFFFFFFFF)
    return verify(keys, x, Chances.of(unconditional, seeds)).num_accepted


def drawn(unconditional, num_windows=20_000, num_drafts=None):
    """num_accepted of windows with seeds and positions of their own."""
    index = torch.arange(num_windows)
    drafts = torch.full_like(index, len(unconditional) if num_drafts is None else num_drafts)
    return accepted(unconditional, index % 100, 7 + index // 100, drafts)


@pytest.mark.parametrize(
    "rates", [(0.8, 0.64, 0.51), (0.9, 0.1), (1.0, 1.0, 0.0), (0.0,), (0.5, 0.5)]
)
def test_every_draft_is_accepted_at_its_unconditional_rate(rates):
    found = drawn(rates)
    for i, rate in enumerate(rates):
        assert (found > i).double().mean().item() == pytest.approx(rate, abs=0.015)


def test_consecutive_positions_of_one_seed_are_independent():
    """Windows of a request follow each other, so its own positions must not be correlated."""
    positions = torch.arange(20_000)
    one = torch.ones_like(positions)
    hit = accepted((0.5,), one * 123, positions, one).double()
    for lag in (1, 2, 3, 64):
        both = (hit[lag:] * hit[:-lag]).mean().item()
        assert both == pytest.approx(0.25, abs=0.02)


def test_company_and_offered_drafts_only_bound_the_draw():
    alone = drawn((0.8, 0.64, 0.51), 500)
    assert torch.equal(drawn((0.8, 0.64, 0.51), 1000)[:500], alone)
    for limit in range(4):
        assert torch.equal(drawn((0.8, 0.64, 0.51), 500, limit), alone.clamp(max=limit))

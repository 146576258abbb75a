"""Truncation by both implementations: what an oracle in plain numbers keeps, in any batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.ops.sampling import truncation as reference
from sametoken.ops.sampling import truncation_triton as kernel
from sametoken.ops.sampling.logits_rules import Truncation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The part of a row's mass by which exponentials in fp64, or in fp32, may move a nucleus' edge.
SLACK = {reference: 1e-11, kernel: 5e-6}

#: temperature, top_k, top_p, min_p
SLOTS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 1, 0.1, 1.0),
    (1.0, 3, 1.0, 0.0),
    (0.5, 20, 0.95, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.7, 0, 1e-9, 0.0),
    (1.7, 2**31 - 1, 0.999, 0.0),
    (1.0, 0, 1.0, 0.2),
    (2.5, 40, 0.7, 0.01),
    (1.0, 0, 1.0, 1.0),
]
KINDS = ["random", "coarse", "equal", "masked", "one", "none"]


@pytest.fixture(params=[reference, kernel], ids=["reference", "triton"])
def implementation(request):
    return request.param


@pytest.fixture
def few_lanes(monkeypatch):
    """So few that a row's edges often lie below what its lanes hold."""
    monkeypatch.setattr(kernel, "_LANES", 16)


def truncation_of(slots) -> Truncation:
    temperature, top_k, top_p, min_p = zip(*slots, strict=True)
    return Truncation(
        torch.tensor(temperature, dtype=torch.float32, device=DEVICE),
        torch.tensor(top_k, dtype=torch.int64, device=DEVICE),
        torch.tensor(top_p, dtype=torch.float64, device=DEVICE),
        torch.tensor(min_p, dtype=torch.float64, device=DEVICE),
    )


def logits_of(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(rows, vocab_size, generator=generator)
    if kind == "coarse":
        logits = (2 * logits).round() / 2
    elif kind == "equal":
        logits.fill_(-1.25)
    elif kind == "masked":
        logits[torch.rand(rows, vocab_size, generator=generator) < 0.6] = -torch.inf
    elif kind == "one":
        logits[:, 1:] = -torch.inf
    elif kind == "none":
        logits.fill_(-torch.inf)
    return logits.to(DEVICE)


def truncated(implementation, logits, slots, truncation: Truncation) -> torch.Tensor:
    out = logits.clone()
    implementation.truncate(out, torch.as_tensor(slots, device=DEVICE), truncation)
    return out


def check_row(before: torch.Tensor, after: torch.Tensor, slot, slack: float) -> None:
    """By the definition: kept logits keep their bits, and are those that the slot keeps."""
    values, kept = before.cpu().numpy(), (after != -torch.inf).cpu().numpy()
    assert torch.equal(after.view(torch.int32)[kept], before.view(torch.int32)[kept])
    temperature, top_k, top_p, min_p = slot
    order = [i for i in np.lexsort((np.arange(len(values)), -values)) if values[i] != -np.inf]
    if temperature > 0 and order:
        best = values[order[0]]
        inverse = np.float32(1) / np.float32(temperature)
        distance = {i: float((values[i] - best) * inverse) for i in order}
        least = math.log(min_p) if min_p else -math.inf
        order = [i for i in order if distance[i] >= least]
        if 0 < top_k < len(order):
            order = [i for i in order if values[i] >= values[order[top_k - 1]]]
        if top_p < 1:
            masses = [math.floor(math.exp(distance[i]) * 2**40) for i in order]
            goal, size = top_p * sum(masses), int(kept.sum())
            assert size > 0
            assert sum(masses[:size]) >= goal - slack * sum(masses)
            assert size == 1 or sum(masses[: size - 1]) < goal + slack * sum(masses)
            order = order[:size]
    assert sorted(order) == kept.nonzero()[0].tolist()


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [(kind, 1000) for kind in KINDS]
    + [(kind, size) for size in (1, 7) for kind in ("random", "none")]
    + [(kind, 5003) for kind in ("random", "coarse", "masked")],
)
def test_what_the_definition_keeps(implementation, vocab_size, kind):
    logits = logits_of(kind, len(SLOTS), vocab_size)
    after = truncated(implementation, logits, range(len(SLOTS)), truncation_of(SLOTS))
    for row, slot in enumerate(SLOTS):
        check_row(logits[row], after[row], slot, SLACK[implementation])
    assert torch.equal(after[:2], logits[:2])


@pytest.mark.parametrize("kind", ["random", "coarse", "equal"])
@pytest.mark.parametrize("slot", [(1.0, 45, 1.0, 0.0), (2.5, 0, 0.8, 0.01), (1.0, 50, 0.97, 0.0)])
def test_edges_below_the_leaders(few_lanes, kind, slot):
    logits = logits_of(kind, 1, 60) / 3
    after = truncated(kernel, logits, [0], truncation_of([slot]))
    check_row(logits[0], after[0], slot, SLACK[kernel])
    # So some lane holds three of them or more.
    assert (after != -torch.inf).sum() > 2 * kernel._LANES
    if kind == "equal":
        assert torch.equal(after, truncated(reference, logits, [0], truncation_of([slot])))


def middle_of(logits: torch.Tensor, size: int) -> float:
    """A top_p whose goal lies in the middle of the mass of the ``size``-th token."""
    masses = (logits - logits.max()).double().exp().sort(descending=True).values
    return float((masses[:size].sum() - masses[size - 1] / 2) / masses.sum())


@pytest.mark.parametrize("sizes", [[1, 2, 19, 250], [257, 900, 2000, 5003]])
def test_a_nucleus_whose_edge_is_clear_is_exact(implementation, sizes):
    logits = logits_of("random", len(sizes), 5003) / 3
    slots = [(1.0, 0, middle_of(row, size), 0.0) for row, size in zip(logits, sizes, strict=True)]
    after = truncated(implementation, logits, range(len(sizes)), truncation_of(slots))
    assert (after != -torch.inf).sum(dim=-1).tolist() == sizes
    for row, size in enumerate(sizes):
        assert torch.equal(after[row].sort().values[-size:], logits[row].sort().values[-size:])


def test_of_tokens_at_the_edge_the_lowest_ids_are_kept(implementation):
    logits = torch.full((2, 5003), -2.0, device=DEVICE)
    logits[:, 4999] = 1.0
    # The best weighs e^3 as much as each of the others.
    goal = (math.exp(3) + 4100.5) / (math.exp(3) + 5002)
    after = truncated(implementation, logits, [0, 1], truncation_of([(1.0, 0, goal, 0.0)] * 2))
    assert (after[0] != -torch.inf).nonzero().squeeze(1).tolist() == [*range(4101), 4999]
    assert torch.equal(after[0], after[1])


def test_a_row_alone_and_in_company(implementation):
    logits = logits_of("coarse", len(SLOTS), 301)
    truncation = truncation_of(SLOTS)
    order = torch.randperm(len(SLOTS), generator=torch.Generator().manual_seed(0))
    together = truncated(implementation, logits[order], order, truncation)
    assert (together == -torch.inf).any()
    for place, row in enumerate(order.tolist()):
        alone = truncated(implementation, logits[row : row + 1], [row], truncation)
        assert torch.equal(alone[0], together[place])
    crowd = order.repeat(2)
    assert torch.equal(truncated(implementation, logits[crowd], crowd, truncation)[-10:], together)


def test_lanes_change_no_bit(few_lanes, monkeypatch):
    logits, truncation = logits_of("random", 2, 60), truncation_of(SLOTS)
    slots = [6, 8]
    few = truncated(kernel, logits, slots, truncation)
    monkeypatch.undo()
    assert kernel._LANES > 60
    assert torch.equal(few, truncated(kernel, logits, slots, truncation))


def test_rows_that_hold_nan_stay_as_they_are(implementation):
    logits = logits_of("random", 4, 700)
    logits[1, 3], logits[2, 699], logits[2, 0] = torch.nan, -torch.nan, torch.inf
    before = logits.clone()
    after = truncated(implementation, logits, [3, 3, 8, 3], truncation_of(SLOTS))
    assert torch.equal(after[1:3].view(torch.int32), before[1:3].view(torch.int32))
    for row in (0, 3):
        check_row(before[row], after[row], SLOTS[3], SLACK[implementation])
        assert (after[row] == -torch.inf).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_an_infinite_logit_takes_all_the_mass(implementation):
    logits = logits_of("random", 3, 50)
    logits[:, [4, 30]] = torch.inf
    slots = [(1.0, 0, 0.5, 0.0), (1.0, 0, 0.51, 0.0), (0.7, 3, 1.0, 0.5)]
    after = truncated(implementation, logits, [0, 1, 2], truncation_of(slots))
    kept = [(row != -torch.inf).nonzero().squeeze(1).tolist() for row in after]
    assert kept == [[4], [4, 30], [4, 30]]


def test_both_zeros_are_one_value(implementation):
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0]], device=DEVICE)
    after = truncated(implementation, logits, [0], truncation_of([(1.0, 1, 1.0, 0.0)]))
    assert (after != -torch.inf).tolist() == [[True, True, False, True, True]]
    assert torch.equal(after[:, [0, 4]].view(torch.int32), logits[:, [0, 4]].view(torch.int32))


@pytest.mark.parametrize("vocab_size", [7, 1000])
@pytest.mark.parametrize("kind", ["random", "equal", "none"])
def test_nothing_beyond_the_rows_is_read_or_written(poisoned_memory, kind, vocab_size):
    memory = torch.empty(2 * 4096 + 4 * vocab_size, device=DEVICE)
    rows = memory[2 * vocab_size : 4 * vocab_size].view(2, vocab_size)
    rows.copy_(logits_of(kind, 2, vocab_size))
    before = rows.clone()
    kernel.truncate(rows, torch.tensor([3, 4], device=DEVICE), truncation_of(SLOTS))
    for row in range(2):
        check_row(before[row], rows[row], SLOTS[3 + row], SLACK[kernel])
    assert memory[: 2 * vocab_size].isnan().all()
    assert memory[4 * vocab_size :].isnan().all()


def test_a_step_without_rows(implementation):
    empty = torch.empty(0, 9, device=DEVICE)
    after = truncated(implementation, empty, torch.empty(0).long(), truncation_of(SLOTS))
    assert after.numel() == 0


def test_it_compiles_for_a_gpu(tmp_path):
    """Vocabularies whose rows are aligned to 16 bytes, and the one that is a constant 1."""
    code = """
from sametoken.ops.sampling.logits_rules import Truncation
from sametoken.ops.sampling.truncation_triton import truncate

integers, doubles = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
for vocab_size in (151936, 1):
    truncation = Truncation(torch.zeros(2), integers, doubles, doubles)
    truncate(torch.zeros(2, vocab_size), integers, truncation)
"""
    compile_launches(code, tmp_path)

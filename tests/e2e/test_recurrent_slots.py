"""An engine over recurrent state: reuse, preemption, chunks, drafts, steps in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.harness import (
    Shape,
    build,
    draft_model,
    request,
    requests_of,
    run,
    scripted,
    swapped_by,
    truth,
)
from helpers.hybrid_toy import HybridToy
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

pytestmark = pytest.mark.usefixtures("layouts")

SHAPE = Shape(prefix_caching=False, cache_emitted=False)
REFERENCE, NATIVE = ReferenceKernels(), NativeKernels()
TOYS = {kernels: HybridToy(kernels=kernels) for kernels in (REFERENCE, NATIVE)}
TOY = TOYS[REFERENCE]
MAX_TOKENS = 20
TIGHT = replace(SHAPE, num_blocks=14)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], [5] * 17, [6, 1], [7, 7, 2, 9, 4, 4, 4]]


requests = partial(requests_of, PROMPTS, MAX_TOKENS)


def test_a_slot_s_next_request_sees_nothing_of_the_last():
    core = build(TOY, replace(SHAPE, max_num_seqs=1))
    assert run(core, requests()).tokens == truth(TOY, requests())


@pytest.mark.parametrize(
    ("steps_in_flight", "temperature", "kernels"),
    [(1, 0.0, REFERENCE), (3, 0.9, NATIVE)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("script", ["right", "wrong", "alternating", "empty", "mixed"])
def test_drafts_leave_every_token_alone(script, steps_in_flight, temperature, kernels):
    shape = replace(SHAPE, steps_in_flight=steps_in_flight)
    toy, items = TOYS[kernels], requests(temperature)
    core = build(toy, shape, kernels=kernels, **scripted(toy, script, kernels))
    drafted = run(core, items)
    assert drafted.tokens == truth(toy, items, kernels)
    assert drafted.offered
    assert (drafted.accepted > 0) == (script != "wrong")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_preempted_requests_go_on_from_the_state_of_their_slot(steps_in_flight, monkeypatch):
    core = build(TOY, replace(TIGHT, steps_in_flight=steps_in_flight), **scripted(TOY, "mixed"))
    swapped = swapped_by(core, monkeypatch)
    assert run(core, requests()).tokens == truth(TOY, requests())
    assert swapped, "nothing was preempted"


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.9), (2, 0.0), (5, 0.9), (5, 0.0)])
def test_a_hybrid_that_drafts_for_itself_is_always_right(k, temperature):
    shape = replace(SHAPE, num_drafts=k, num_blocks=90)
    items = requests(temperature)
    core = build(TOY, shape, make_drafter=lambda parts: draft_model(parts, TOY))
    drafted = run(core, items)
    assert drafted.tokens == truth(TOY, items)
    assert drafted.accepted == drafted.offered > 0


@pytest.mark.parametrize("kernels", [NATIVE, REFERENCE], ids=lambda kernels: kernels.name)
def test_logits_of_accepted_rows_have_the_bits_of_plain_decoding(kernels):
    toy, item = TOYS[kernels], request("r", PROMPTS[1], max_tokens=MAX_TOKENS)
    plain = build(toy, SHAPE, kernels=kernels)
    run(plain, [item])
    drafted = build(toy, SHAPE, kernels=kernels, **scripted(TOY, "mixed"))
    run(drafted, [item])
    true = {position: row for _, position, row in plain.accepted_logits}
    rows = drafted.accepted_logits
    compared = [torch.equal(row, true[position]) for _, position, row in rows if position in true]
    assert all(compared)
    assert len(compared) >= 20

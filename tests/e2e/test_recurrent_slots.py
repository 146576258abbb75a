"""An engine over recurrent state: reuse, preemption, chunks, drafts, steps in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.harness import Parts, ScriptedDrafter, Shape, allocate, build, request, run
from helpers.hybrid_toy import HybridToy
from sametoken.drafters.coupling import Coupling
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.kernels.native.bundle import NativeKernels
from sametoken.kernels.reference import ReferenceKernels

SHAPE = Shape(prefix_caching=False, cache_emitted=False)
TIGHT = replace(SHAPE, num_blocks=14)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], [5] * 17, [6, 1], [7, 7, 2, 9, 4, 4, 4]]


def requests(max_tokens: int = 20, **params):
    return [
        request(f"r{i}", prompt, max_tokens=max_tokens, seed=i, **params)
        for i, prompt in enumerate(PROMPTS)
    ]


def alone(item, shape: Shape = SHAPE) -> list[int]:
    """A request's tokens in an engine that has never run another."""
    return run(build(HybridToy(), shape), [item]).tokens[item.request_id]


def oracle(admission) -> list[int]:
    """What a scripted drafter is told: the plain continuation, and some tokens beyond it."""
    item = request("x", admission.prompt_token_ids, max_tokens=40)
    return alone(replace(item, params=admission.params), replace(SHAPE, max_num_seqs=1))


def test_a_slot_s_next_request_sees_nothing_of_the_last():
    shape = replace(SHAPE, max_num_seqs=1)
    core = build(HybridToy(), shape)
    items = requests()
    assert run(core, items).tokens == {item.request_id: alone(item) for item in items}


@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize("script", ["right", "wrong", "alternating", "empty", "mixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_leave_every_token_alone(script, steps_in_flight, temperature):
    shape = replace(SHAPE, steps_in_flight=steps_in_flight)
    items = requests(temperature=temperature)
    core = build(
        HybridToy(),
        shape,
        make_drafter=lambda parts: ScriptedDrafter(parts, script),
        oracle=oracle,
    )
    drafted = run(core, items)
    assert drafted.tokens == {item.request_id: alone(item) for item in items}
    assert drafted.offered
    assert (drafted.accepted > 0) == (script != "wrong")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_preempted_requests_go_on_from_the_state_of_their_slot(steps_in_flight):
    shape = replace(TIGHT, steps_in_flight=steps_in_flight)
    items = requests()
    core = build(
        HybridToy(),
        shape,
        make_drafter=lambda parts: ScriptedDrafter(parts, "mixed"),
        oracle=oracle,
    )
    moved = []
    move_in = core._runner.swap.move_in

    class Watch:
        def move_out(self, plan):
            moved.extend(plan.swap_outs)
            watched.move_out(plan)

        def move_in(self, plan):
            move_in(plan)

    watched = core._runner.swap
    core._runner = replace(core._runner, swap=Watch())
    assert run(core, items).tokens == {item.request_id: alone(item) for item in items}
    assert moved, "nothing was preempted"


def self_drafter(parts: Parts, model: HybridToy, k: int) -> DraftModelDrafter:
    """The target as its own draft model, with recurrent state of its own."""
    cache = allocate(model.caches, parts.shape, k)
    return DraftModelDrafter(model, cache, k, Coupling(parts.kernels.sample, parts.table))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_hybrid_that_drafts_for_itself_is_always_right(k, temperature):
    shape = replace(SHAPE, num_drafts=k, num_blocks=90)
    items = requests(temperature=temperature)
    core = build(HybridToy(), shape, make_drafter=lambda parts: self_drafter(parts, HybridToy(), k))
    drafted = run(core, items)
    assert drafted.tokens == {item.request_id: alone(item) for item in items}
    assert drafted.accepted == drafted.offered > 0


@pytest.mark.parametrize("kernels", [NativeKernels(), ReferenceKernels()], ids=lambda k: k.name)
def test_logits_of_accepted_rows_have_the_bits_of_plain_decoding(kernels):
    item = request("r", PROMPTS[1], max_tokens=20)
    plain = build(HybridToy(kernels=kernels), SHAPE, kernels=kernels)
    run(plain, [item])
    drafted = build(
        HybridToy(kernels=kernels),
        SHAPE,
        kernels=kernels,
        make_drafter=lambda parts: ScriptedDrafter(parts, "mixed"),
        oracle=oracle,
    )
    run(drafted, [item])
    true = {position: row for _, position, row in plain._runner.verifier.accepted_logits}
    rows = drafted._runner.verifier.accepted_logits
    compared = [torch.equal(row, true[position]) for _, position, row in rows if position in true]
    assert all(compared)
    assert len(compared) >= 20

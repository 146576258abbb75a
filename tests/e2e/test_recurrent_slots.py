"""An engine over recurrent state: reuse, preemption, chunks, drafts, steps in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch

from helpers.harness import (
    Parts,
    ScriptedDrafter,
    Shape,
    allocate,
    build,
    request,
    requests_of,
    run,
)
from helpers.hybrid_toy import HybridToy
from sametoken.drafters.context import Coupling
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

pytestmark = pytest.mark.usefixtures("layouts")

SHAPE = Shape(prefix_caching=False, cache_emitted=False)
REFERENCE, NATIVE = ReferenceKernels(), NativeKernels()
MAX_TOKENS = 20
TIGHT = replace(SHAPE, num_blocks=14)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], [5] * 17, [6, 1], [7, 7, 2, 9, 4, 4, 4]]


requests = partial(requests_of, PROMPTS, MAX_TOKENS)


@lru_cache
def continuation(prompt: tuple[int, ...], temperature: float, seed: int, kernels=REFERENCE):
    """Tokens in an engine that has never run another request, some more than are asked for."""
    item = request("x", prompt, max_tokens=MAX_TOKENS + 8, temperature=temperature, seed=seed)
    shape = replace(SHAPE, max_num_seqs=1)
    core = build(HybridToy(kernels=kernels), shape, kernels=kernels, steps="compact")
    return run(core, [item]).tokens["x"]


def alone(items, kernels=REFERENCE) -> dict[str, list[int]]:
    return {item.request_id: oracle(item, kernels)[:MAX_TOKENS] for item in items}


def oracle(asked, kernels=REFERENCE) -> list[int]:
    params = asked.params
    return continuation(asked.prompt_token_ids, params.temperature, params.seed, kernels)


def test_a_slot_s_next_request_sees_nothing_of_the_last():
    core = build(HybridToy(), replace(SHAPE, max_num_seqs=1))
    assert run(core, requests()).tokens == alone(requests())


@pytest.mark.parametrize(
    ("steps_in_flight", "temperature", "kernels"),
    [(1, 0.0, REFERENCE), (3, 0.9, NATIVE)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("script", ["right", "wrong", "alternating", "empty", "mixed"])
def test_drafts_leave_every_token_alone(script, steps_in_flight, temperature, kernels):
    shape = replace(SHAPE, steps_in_flight=steps_in_flight)
    items = requests(temperature)
    core = build(
        HybridToy(kernels=kernels),
        shape,
        make_drafter=lambda parts: ScriptedDrafter(parts, script),
        oracle=lambda admitted: oracle(admitted, kernels),
        kernels=kernels,
    )
    drafted = run(core, items)
    assert drafted.tokens == alone(items, kernels)
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
    assert run(core, items).tokens == alone(items)
    assert moved, "nothing was preempted"


def self_drafter(parts: Parts, model: HybridToy, k: int) -> DraftModelDrafter:
    """The target as its own draft model, with recurrent state of its own."""
    cache = allocate(model.caches, parts.shape, k)
    return DraftModelDrafter(model, cache, k, Coupling(parts.kernels.sample, parts.table))


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.9), (2, 0.0), (5, 0.9), (5, 0.0)])
def test_a_hybrid_that_drafts_for_itself_is_always_right(k, temperature):
    shape = replace(SHAPE, num_drafts=k, num_blocks=90)
    items = requests(temperature)
    core = build(HybridToy(), shape, make_drafter=lambda parts: self_drafter(parts, HybridToy(), k))
    drafted = run(core, items)
    assert drafted.tokens == alone(items)
    assert drafted.accepted == drafted.offered > 0


@pytest.mark.parametrize("kernels", [NATIVE, REFERENCE], ids=lambda kernels: kernels.name)
def test_logits_of_accepted_rows_have_the_bits_of_plain_decoding(kernels):
    item = request("r", PROMPTS[1], max_tokens=MAX_TOKENS)
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
    true = {position: row for _, position, row in plain.accepted_logits}
    rows = drafted.accepted_logits
    compared = [torch.equal(row, true[position]) for _, position, row in rows if position in true]
    assert all(compared)
    assert len(compared) >= 20

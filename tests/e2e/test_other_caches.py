"""An engine over two recurrent rules and latents: nothing asks for Gated DeltaNet."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import pytest

from helpers.decaying_sum import MixedToy
from helpers.harness import ScriptedDrafter, Shape, allocate, build, request, requests_of, run
from sametoken.drafters.context import Coupling
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.runner.swap import SwapStore
from sametoken.types.sampling_params import SamplingParams

SHAPE = Shape(prefix_caching=False, cache_emitted=False)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], [5] * 17, [6, 1], [7, 7, 2, 9, 4, 4, 4]]

both_bundles = pytest.mark.parametrize(
    "kernels", [NativeKernels(), ReferenceKernels()], ids=lambda kernels: kernels.name
)


requests = partial(requests_of, PROMPTS, 16)


@lru_cache
def alone(prompt: tuple[int, ...], params: SamplingParams, kernels) -> list[int]:
    """A request's tokens without drafts and in a batch of its own, more than it may have."""
    core = build(MixedToy(kernels=kernels), replace(SHAPE, max_num_seqs=1))
    item = replace(request("x", prompt, max_tokens=40), params=params)
    return run(core, [item]).tokens["x"]


@both_bundles
@pytest.mark.parametrize("num_blocks", [90, 14])
@pytest.mark.parametrize("script", ["right", "mixed"])
def test_drafts_and_preemption_leave_every_token_alone(kernels, num_blocks, script, monkeypatch):
    saved, save = [], SwapStore._save

    def watched(store, swap):
        saved.append(swap)
        save(store, swap)

    monkeypatch.setattr(SwapStore, "_save", watched)
    items = requests(0.9)
    core = build(
        MixedToy(kernels=kernels),
        replace(SHAPE, num_blocks=num_blocks, steps_in_flight=2),
        make_drafter=lambda parts: ScriptedDrafter(parts, script),
        oracle=lambda asked: alone(asked.prompt_token_ids, asked.params, kernels),
    )
    drafted = run(core, items)
    for item in items:
        truth = alone(item.prompt_token_ids, item.params, kernels)
        assert drafted.tokens[item.request_id] == truth[:16]
    assert drafted.accepted > 0
    assert bool(saved) == (num_blocks == 14)


@both_bundles
def test_the_target_as_its_own_drafter_is_always_right(kernels):
    def self_drafter(parts) -> DraftModelDrafter:
        model, k = MixedToy(kernels=kernels), parts.shape.num_drafts
        cache = allocate(model.caches, parts.shape, k)
        return DraftModelDrafter(model, cache, k, Coupling(parts.kernels.sample, parts.table))

    drafted = run(build(MixedToy(kernels=kernels), SHAPE, make_drafter=self_drafter), requests())
    assert drafted.accepted == drafted.offered > 0

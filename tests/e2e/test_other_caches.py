"""An engine over two recurrent rules and latents: nothing asks for Gated DeltaNet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from helpers.decaying_sum import MixedToy
from helpers.harness import (
    Shape,
    build,
    draft_model,
    requests_of,
    run,
    scripted,
    swapped_by,
    truth,
)
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

SHAPE = Shape(prefix_caching=False, cache_emitted=False)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], [5] * 17, [6, 1], [7, 7, 2, 9, 4, 4, 4]]

both_toys = pytest.mark.parametrize(
    "toy",
    [MixedToy(kernels=kernels) for kernels in (NativeKernels(), ReferenceKernels())],
    ids=lambda toy: toy.kernels.name,
)


requests = partial(requests_of, PROMPTS, 16)


@both_toys
@pytest.mark.parametrize("num_blocks", [90, 14])
@pytest.mark.parametrize("script", ["right", "mixed"])
def test_drafts_and_preemption_leave_every_token_alone(toy, num_blocks, script, monkeypatch):
    items = requests(0.9)
    shape = replace(SHAPE, num_blocks=num_blocks, steps_in_flight=2)
    core = build(toy, shape, **scripted(toy, script))
    swapped = swapped_by(core, monkeypatch)
    drafted = run(core, items)
    assert drafted.tokens == truth(toy, items)
    assert drafted.accepted > 0
    assert bool(swapped) == (num_blocks == 14)


@both_toys
def test_the_target_as_its_own_drafter_is_always_right(toy):
    core = build(toy, SHAPE, make_drafter=lambda parts: draft_model(parts, toy))
    drafted = run(core, requests())
    assert drafted.accepted == drafted.offered > 0

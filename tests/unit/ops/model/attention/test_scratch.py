"""Memory of a launch of attention beside its result: the most that is planned is what one has."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from sametoken.ops.backend import AttentionShape, RunGroup
from sametoken.ops.model.attention import hopper, triton
from sametoken.ops.model.attention.scratch import Launches, Runs
from sametoken.ops.model.latent_attention import hopper as latent_hopper
from sametoken.ops.model.latent_attention import tuning as latent
from sametoken.ops.model.latent_attention.shape import LatentShape

HEADS = AttentionShape(32, 8, 128)
LARGE_HEADS = AttentionShape(16, 4, 256, sliding_window=1024)
LATENT = LatentShape(20, 512, 64, 1.0)
MAX_RUNS, MAX_WIDTH, MAX_ROWS, BF16 = 40, 60, 400, torch.bfloat16


def on_hopper(shape, max_len, num_runs, width, num_rows):
    config = hopper.choose(num_runs, width, num_rows, shape, max_len)
    return hopper.scratch_of(RunGroup(0, num_runs, width), num_rows, shape, max_len, config)


def elsewhere(shape, max_len, num_runs, width, num_rows):
    config = triton.choose(num_runs, width, shape, max_len, BF16)
    return triton.scratch_of(RunGroup(0, num_runs, width), shape, max_len, config)


def of_latents_on_hopper(heads, max_len, num_runs, width, num_rows):
    config = latent_hopper.choose(num_runs, width, num_rows, heads, max_len)
    return latent_hopper.scratch_of(RunGroup(0, num_runs, width), num_rows, heads, max_len, config)


def of_latents_elsewhere(shape, max_len, num_runs, width, num_rows):
    config = latent.choose(num_runs, width, shape.num_heads, max_len, BF16)
    sizes = (shape.num_heads, shape.rank)
    return latent.scratch_of(RunGroup(0, num_runs, width), num_rows, sizes, max_len, config)


@pytest.mark.parametrize("max_len", [256, 8192, 131_072])
@pytest.mark.parametrize(
    ("planned", "scratch_of"),
    [
        (partial(hopper.most_scratch, HEADS), partial(on_hopper, HEADS)),
        (partial(hopper.most_scratch, LARGE_HEADS), partial(on_hopper, LARGE_HEADS)),
        (partial(triton.most_scratch, HEADS, BF16), partial(elsewhere, HEADS)),
        (partial(latent_hopper.most_scratch, 20), partial(of_latents_on_hopper, 20)),
        (partial(latent.most_scratch, LATENT, BF16), partial(of_latents_elsewhere, LATENT)),
    ],
)
def test_what_is_planned_is_the_most_of_all_launches(planned, scratch_of, max_len):
    runs = tuple(Runs(num_runs, 1, MAX_WIDTH) for num_runs in range(1, MAX_RUNS + 1))
    launches = product(range(1, MAX_RUNS + 1), range(1, MAX_WIDTH + 1))
    most = max(
        scratch_of(max_len, num_runs, width, num_rows).nbytes
        for num_runs, width in launches
        for num_rows in {width, min(num_runs * width, MAX_ROWS), MAX_ROWS}
    )
    assert planned(Launches(runs, MAX_ROWS, max_len)) == most

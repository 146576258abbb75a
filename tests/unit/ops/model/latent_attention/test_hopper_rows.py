"""Latent attention on Hopper, its kernels run in Python: values, and a row's bits in every form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.few_programs import choosing, few
from helpers.gluon_interpreter import interpreted
from helpers.latent_scene import LatentScene
from helpers.rows import runs_of
from sametoken.ops.backend import RowRuns
from sametoken.ops.model.latent_attention import hopper
from sametoken.ops.model.latent_attention.shape import LayerLatent

SCALE = 0.07
#: The slot after the last has no request.
LENGTHS, DEAD = [530, 270, 40], (3, 0)
#: A chunk and rows of a slot each, in uneven runs with dead rows and a run without rows.
WHERE = [
    *((0, at) for at in range(527, 530)), DEAD, (1, 255), (1, 256), DEAD, (2, 0), (1, 269)
]  # fmt: skip
RUNS = [4, 3, 0, 1, 1]
SPREAD = [*hopper.CONFIGS.values(), hopper.JOINING]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(hopper, "choose", choosing(hopper.choose))


def scene_of(heads: int, dtype: torch.dtype, block_size: int, scale=None) -> LatentScene:
    sizes = {"rank": hopper.RANK, "rope_dim": hopper.WIDTH - hopper.RANK}
    return LatentScene(
        LENGTHS, heads=heads, dtype=dtype, block_size=block_size, scale=scale, **sizes
    )


def run(scene: LatentScene, where, runs: RowRuns, config=None, memory=None, seed=0) -> Tensor:
    """Attention of these rows."""
    q, rows = scene.rows(where, runs)
    with interpreted(seed):
        return hopper.attention(q, SCALE, rows, memory or scene.memory, config=config)


def in_all_forms(scene: LatentScene, memory: LayerLatent) -> Tensor:
    """What every form computes of ``WHERE``, whose bits are equal."""
    runs, first = runs_of(RUNS), None
    spread = [replace(one, programs=count) for one, count in zip(SPREAD, (2, 5, 3, 4), strict=True)]
    for seed, config in enumerate((hopper.WHOLE_ROWS, *spread)):
        out = run(scene, WHERE, runs, config, memory, seed)
        first = out if first is None else first
        assert torch.equal(out, first), config
    return first


@pytest.mark.parametrize(
    ("heads", "dtype", "block_size"),
    [(5, torch.bfloat16, 16), (20, torch.float16, 64), (11, torch.bfloat16, 128)],
    ids=str,
)
def test_every_form_has_the_reference_s_values_and_equal_bits(heads, dtype, block_size):
    scene = scene_of(heads, dtype, block_size)
    out = in_all_forms(scene, scene.memory)
    live = torch.tensor([at != DEAD for at in WHERE])
    expected = scene.expected(*scene.rows([at for at in WHERE if at != DEAD]), SCALE)
    torch.testing.assert_close(out[live].float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert not out[~live].any()


@pytest.mark.parametrize(
    ("heads", "dtype", "block_size", "scale"),
    [(5, torch.bfloat16, 16, 1.0), (16, torch.float16, 64, 0.5), (20, torch.bfloat16, 128, 1.0)],
    ids=str,
)
def test_float8_has_the_bits_of_its_numbers_in_16_bits(heads, dtype, block_size, scale):
    scene = scene_of(heads, dtype, block_size, scale)
    stored = scene.memory
    wide = LayerLatent((stored.vectors.to(dtype) * scale).to(dtype), stored.rank)
    given = stored if scale != 1.0 else replace(stored, scale=None)
    expected = run(scene, WHERE, runs_of(RUNS), memory=wide)
    assert torch.equal(in_all_forms(scene, given), expected)


def test_a_scale_of_float8_is_that_of_the_reference():
    scene = scene_of(5, torch.bfloat16, 16, 0.3)
    live = [at for at in WHERE if at != DEAD]
    out = run(scene, live, RowRuns.even(len(live), 1))
    expected = scene.expected(*scene.rows(live), SCALE)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_prompts_windows_and_single_rows_have_equal_bits(scale):
    scene = scene_of(5, torch.bfloat16, 16, scale)
    prompt = run(scene, [(1, at) for at in range(230, 270)], RowRuns.even(1, 40))
    for first, last in ((230, 231), (254, 259), (266, 270)):
        where = [(1, at) for at in range(first, last)]
        together = run(scene, where, RowRuns.even(1, last - first))
        alone = run(scene, where, RowRuns.even(last - first, 1), seed=1)
        assert torch.equal(together, prompt[first - 230 : last - 230])
        assert torch.equal(alone, prompt[first - 230 : last - 230])


@pytest.mark.parametrize("scale", [None, 1.0])
def test_a_faulty_key_spoils_only_rows_that_see_it(scale):
    scene = scene_of(5, torch.bfloat16, 16, scale)
    where, runs = [(1, at) for at in range(76, 84)], RowRuns.even(1, 8)
    expected = run(scene, where, runs)
    scene.memory.vectors[scene.table[1, 80 // 16], 80 % 16, hopper.RANK :] = torch.nan
    for config in map(few, (*SPREAD, hopper.WHOLE_ROWS)):
        found = run(scene, where, runs, config)
        assert torch.equal(found[:4], expected[:4])
        assert found[4:].isnan().all()

"""The rotation and the write of latents in Triton, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.latent_attention import reference, rope_triton
from sametoken.ops.model.latent_attention.shape import LatentRotary, LayerLatent

ROWS, RANK, ROPE = 5, 24, 8


def arguments(heads=3, interleaved=True, dtype=torch.float32, before=8):
    torch.manual_seed(0)
    q = torch.randn(ROWS, heads, ROPE + 4).to(dtype)[..., 4:]
    latent = torch.randn(ROWS, RANK + ROPE + before).to(dtype)[:, before:]
    angles = torch.rand(64, ROPE // 2)
    rotary = LatentRotary(
        torch.randn(RANK).to(dtype), 1e-6, angles.cos(), angles.sin(), interleaved
    )
    positions = torch.tensor([3, 4, 60, 0, 9])
    kv_slots = torch.tensor([19, 20, 44, 0, 25])
    rows = AttentionRows(positions, positions * 0, kv_slots, torch.zeros(1, 4, dtype=torch.int64))
    memory = LayerLatent(torch.full((3, 16, RANK + ROPE), torch.nan, dtype=dtype), RANK)
    out = torch.full((ROWS, heads, RANK + ROPE), torch.nan, dtype=dtype)[..., RANK:]
    return q, latent, rotary, rows, memory, out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "before"), [(1, 3), (3, 8), (20, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_agrees_with_the_reference(heads, before, interleaved, dtype):
    ours = arguments(heads, interleaved, dtype, before)
    theirs = arguments(heads, interleaved, dtype, before)
    rope_triton.rope_and_cache(*ours)
    reference.rope_and_cache(*theirs)
    tolerance = 2e-6 if dtype is torch.float32 else 2e-3
    for got, expected in ((ours[5], theirs[5]), (ours[4].vectors, theirs[4].vectors)):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert ours[4].vectors.isfinite().all(-1).sum() == ROWS, "only the rows' vectors are written"


def test_neighbours_are_rotated_as_a_pair_only_if_interleaved():
    q, latent, rotary, rows, memory, out = arguments()
    half = ROPE // 2
    order = torch.cat((torch.arange(0, ROPE, 2), torch.arange(1, ROPE, 2)))
    reference.rope_and_cache(q, latent, rotary, rows, memory, out)
    apart = torch.empty_like(out)
    reference.rope_and_cache(
        q[..., order], latent, replace(rotary, interleaved=False), rows, memory, apart
    )
    assert torch.equal(out, apart)
    rotated = torch.view_as_complex(q[2].unflatten(-1, (half, 2)).contiguous())
    rotated = rotated * torch.complex(rotary.cos[60], rotary.sin[60])
    expected = torch.cat((rotated.real, rotated.imag), dim=-1)
    torch.testing.assert_close(out[2], expected)


@pytest.mark.parametrize("stored", [torch.float32, FLOAT8])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_a_fault_is_stored_as_a_key_that_nobody_can_use_and_finite_values(stored):
    q, latent, rotary, rows, memory, out = arguments()
    memory = LayerLatent(memory.vectors.to(stored), RANK)
    latent[1, 0], latent[2, RANK] = torch.inf, torch.nan
    rope_triton.rope_and_cache(q, latent, rotary, rows, memory, out)
    written = memory.vectors.float().flatten(0, 1)[rows.kv_slots]
    assert written[:, :RANK].isfinite().all()
    assert written[:, RANK:].isnan().any(-1).tolist() == [False, True, True, False, False]


def test_real_sizes_compile(tmp_path):
    compile_launches(
        """
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.latent_attention.rope_triton import rope_and_cache
from sametoken.ops.model.latent_attention.shape import LatentRotary, LayerLatent
at = torch.zeros(3, dtype=torch.int64)
table = torch.zeros(9, 32)
rotary = LatentRotary(torch.zeros(512, dtype=torch.bfloat16), 1e-6, table, table, True)
memory = LayerLatent(torch.zeros(2, 16, 576, dtype=torch.bfloat16), 512)
q, out = (torch.zeros(3, 20, width, dtype=torch.bfloat16) for width in (256, 576))
latent = torch.zeros(3, 768 + 576, dtype=torch.bfloat16)[:, 768:]
rows = AttentionRows(at, at, at, at[None])
small = LayerLatent(memory.vectors.to(torch.float8_e4m3fn), 512, torch.ones(1))
for written in (memory, small):
    rope_and_cache(q[..., 192:], latent, rotary, rows, written, out[..., 512:])
""",
        tmp_path,
    )

"""The interpreter of kernels in Gluon finds faults that a chip shows now and then."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from helpers.gluon_blocks import Block
from helpers.gluon_interpreter import interpreted
from helpers.gluon_ptx import evaluated
from sametoken.ops.hopper_layouts import boxes, load_box, new_barriers, swizzled

ROWS, DEPTH, TILES = 64, 64, 7


@gluon.jit
def _load(x, ring, full, free, waits: gl.constexpr):
    for tile in range(TILES):
        if waits:
            mbarrier.wait(free.index(tile % 2), ((tile // 2) & 1) ^ 1)
        mbarrier.expect(full.index(tile % 2), ROWS * DEPTH * 2)
        load_box(x, [tile * ROWS, 0], full.index(tile % 2), ring.index(tile % 2))


@gluon.jit
def _sum(out, ring, ones, full, free, pendings: gl.constexpr, waits: gl.constexpr):
    sums = gl.zeros([ROWS, ROWS], gl.float32, None)
    for tile in range(TILES):
        if waits:
            mbarrier.wait(full.index(tile % 2), (tile // 2) & 1)
        token = warpgroup_mma(ring.index(tile % 2), ones.permute((1, 0)), sums, is_async=True)
        token = warpgroup_mma_wait(pendings, deps=(token,))
        mbarrier.arrive(free.index(tile % 2), count=1)
        sums = warpgroup_mma_wait(0, deps=(token,))
    row = gl.arange(0, ROWS, layout=None)
    gl.store(out + row[:, None] * ROWS + row[None, :], sums)


@gluon.jit
def _take(out, ring, full, free, early: gl.constexpr):
    sums = gl.zeros([ROWS, DEPTH], gl.float32, None)
    for tile in range(TILES):
        mbarrier.wait(full.index(tile % 2), (tile // 2) & 1)
        taken = ring.index(tile % 2).load(None)
        if early:
            mbarrier.arrive(free.index(tile % 2), count=1)
        sums = sums + taken.to(gl.float32)
        if not early:
            mbarrier.arrive(free.index(tile % 2), count=1)
    row = gl.arange(0, ROWS, layout=None)
    gl.store(out + row[:, None] * DEPTH + row[None, :], sums)


@gluon.jit
def _kernel_of_loads(x, out, early: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, DEPTH], swizzled(gl.bfloat16))
    full, free = new_barriers(2, 1), new_barriers(2, 1)
    gl.warp_specialize(
        [(_take, (out, ring, full, free, early)), (_load, (x, ring, full, free, True))], [1], [24]
    )


@gluon.jit
def _kernel(x, out, fault: gl.constexpr):
    layout: gl.constexpr = swizzled(gl.bfloat16)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, DEPTH], layout)
    ones = gl.allocate_shared_memory(gl.bfloat16, [ROWS, DEPTH], layout)
    ones.store(gl.full([ROWS, DEPTH], 1.0, gl.bfloat16, None))
    if fault != "no fence":
        fence_async_shared()
    full, free = new_barriers(2, 1), new_barriers(2, 2 if fault == "one arrival" else 1)
    gl.warp_specialize(
        [
            (_sum, (
                out, ring, ones, full, free, 1 if fault == "freed early" else 0,
                fault != "not full",
            )),
            (_load, (x, ring, full, free, fault != "not free")),
        ],
        [1], [24],
    )  # fmt: skip


def given() -> torch.Tensor:
    return torch.randn(TILES * ROWS, DEPTH, generator=torch.Generator().manual_seed(0)).bfloat16()


def launched(seed: int, fault: str = "", room: int = ROWS * ROWS) -> tuple[torch.Tensor, ...]:
    """What the kernel computes, and what it is."""
    x, out = given(), torch.zeros(room)
    with interpreted(seed, also=sys.modules[__name__]):
        _kernel[(1,)](boxes(x, ROWS), out, fault=fault)
    expected = x.view(TILES, ROWS, DEPTH).double().sum((0, 2))[:, None].expand(ROWS, ROWS)
    return out.view(ROWS, ROWS), expected


@pytest.mark.parametrize("seed", range(5))
def test_partitions_in_any_order_compute_a_product(seed):
    found, expected = launched(seed)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("one arrival", "2 partitions wait for ever"),
        ("no fence", "stored without a fence"),
        ("freed early", "what a product reads changed"),
        ("not free", "more arrivals|what a product reads changed|wait for ever"),
        ("not full", "what a product reads changed|wait for ever"),
    ],
)
def test_a_fault_of_synchronisation_is_found(fault, what):
    """In some order, or by NaN, which shared memory is where nothing has come."""
    said, num_nan = "", 0
    for seed in range(8):
        try:
            out, _ = launched(seed, fault)
        except AssertionError as error:
            said += str(error)
        else:
            num_nan += bool(out.isnan().any())
    assert num_nan or re.search(what, said)


@pytest.mark.parametrize("early", [False, True])
def test_a_copy_that_may_overtake_a_load_is_found(early):
    """A load is in flight until its value is used, whatever barrier comes between."""
    said = []
    for seed in range(8):
        x, out = given(), torch.zeros(ROWS, DEPTH)
        try:
            with interpreted(seed, also=sys.modules[__name__]):
                _kernel_of_loads[(1,)](boxes(x, ROWS), out, early=early)
        except AssertionError as error:
            said.append(str(error))
        else:
            expected = x.view(TILES, ROWS, DEPTH).double().sum(0)
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool(said) == early
    assert all("a copy covers" in one for one in said)


def test_an_access_outside_of_a_tensor_is_found():
    with pytest.raises(AssertionError, match="outside"):
        launched(0, room=ROWS * ROWS - 1)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "c", "expected"),
    [
        # 261 is a tie between 260 and 262, and fp32 and fp64 have no room for what is added.
        (torch.bfloat16, 9, 29, 0.0, 260),
        (torch.bfloat16, 9, 29, 2.0**-60, 262),
        (torch.bfloat16, 9, -29, -(2.0**-60), -262),
        (torch.bfloat16, 9, 29, -(2.0**-60), 260),
        (torch.bfloat16, 5, 53, -(2.0**-60), 264),
        (torch.bfloat16, 2.0**-100, 2.0**-33, -0.0, 2.0**-133),
        (torch.float16, 3, 683, 0.0, 2048),
        (torch.float16, 3, 683, 2.0**-24, 2050),
        (torch.float16, 2.0**-12, 2.0**-12, 2.0**-24, 2.0**-23),
    ],
)
def test_multiply_adds_of_pairs_are_rounded_once(dtype, a, b, c, expected):
    """Subnormal numbers are kept."""
    words = [torch.tensor([[one, 1]], dtype=dtype).view(torch.int32) for one in (a, b, c)]
    kind = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    found = evaluated(f"fma.rn.{kind} $0, $1, $2, $3;", [*map(Block, words)])
    assert found.data.view(dtype).tolist() == [[expected, 2]]


def test_bits_are_chosen_by_a_table():
    """PTX finds a table as it finds a result, from 0xF0, 0xCC and 0xAA."""
    words = [Block(torch.tensor([one])) for one in (0x8000_F0F0, 0xCCCC, 0xAAAA)]
    code = """{
        .reg .b32 both, ones;
        mov.b32 ones, 0xFF00FF00;
        lop3.b32 both, $1, $2, $3, 0xEA;
        lop3.b32 both, both, ones, 0, 0x30;
        shr.b32 $0, both, 4;
    }"""
    a, b, c = (int(one.data) for one in words)
    assert int(evaluated(code, words).data) == ((a & b | c) & ~0xFF00FF00) >> 4
    # A lone bit 31 is no sign.
    assert int(evaluated("shr.b32 $0, $1, 31;", words).data) == 1


@gluon.jit
def _copied_kernel(x, out, fault: gl.constexpr):
    """Copy tiles of a column ahead of their use, in two of a ring's three places."""
    ring = gl.allocate_shared_memory(gl.float32, [3, ROWS, 1], None)
    at = gl.arange(0, ROWS, layout=None)[:, None]
    for tile in gl.static_range(2):
        async_copy.async_copy_global_to_shared(ring.index(tile), x + tile * ROWS + at)
        async_copy.commit_group()
    for tile in range(TILES):
        async_copy.wait_group(2 if fault == "waits for too few" else 1)
        if fault != "no barrier":
            gl.thread_barrier()
        next_tile = tile + (0 if fault == "too early" else 2)
        held = ring.index(tile % 3).load(None)
        exists = (at < ROWS) & (next_tile < (3 if fault == "masked" else TILES))
        ahead = x + next_tile * ROWS + at
        async_copy.async_copy_global_to_shared(ring.index(next_tile % 3), ahead, mask=exists)
        async_copy.commit_group()
        gl.store(out + tile * ROWS + at, held)


def copied(fault: str) -> bool:
    """Whether the kernel copies."""
    x = torch.randn(TILES * ROWS, generator=torch.Generator().manual_seed(0))
    out = torch.zeros_like(x)
    with interpreted(also=sys.modules[__name__]):
        _copied_kernel[(1,)](x, out, fault=fault)
    return torch.equal(out, x)


@pytest.mark.parametrize("fault", ["waits for too few", "masked"])
def test_what_has_not_been_copied_yet_or_at_all_is_nan(fault):
    assert copied("")
    assert not copied(fault)


@pytest.mark.parametrize(
    ("fault", "what"),
    [("too early", "what may still be read"), ("no barrier", "two copies to one place")],
)
def test_a_copy_that_threads_may_not_begin_yet_is_found(fault, what):
    with pytest.raises(AssertionError, match=what):
        copied(fault)


@gluon.jit
def _copy_tiles(x, ring, full, free, fault: gl.constexpr):
    at = gl.arange(0, ROWS, layout=None)[:, None]
    for tile in range(TILES):
        if fault != "does not wait":
            mbarrier.wait(free.index(tile % 2), (tile // 2 & 1) ^ 1)
        async_copy.async_copy_global_to_shared(ring.index(tile % 2), x + tile * ROWS + at)
        async_copy.mbarrier_arrive(full.index(tile % 2), increment_count=False)


@gluon.jit
def _store_tiles(out, ring, full, free, fault: gl.constexpr):
    at = gl.arange(0, ROWS, layout=None)[:, None]
    for tile in range(TILES):
        if fault != "reads early":
            mbarrier.wait(full.index(tile % 2), tile // 2 & 1)
        gl.store(out + tile * ROWS + at, ring.index(tile % 2).load(None))
        mbarrier.arrive(free.index(tile % 2))


@gluon.jit
def _handed_over_kernel(x, out, fault: gl.constexpr):
    """A warp copies tiles that another one stores, two ahead."""
    ring = gl.allocate_shared_memory(gl.float32, [2, ROWS, 1], None)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(2):
        mbarrier.init(full.index(one), count=32)
        mbarrier.init(free.index(one), count=1)
    gl.warp_specialize(
        [
            (_store_tiles, (out, ring, full, free, fault)),
            (_copy_tiles, (x, ring, full, free, fault)),
        ],
        [1], [24],
    )  # fmt: skip


def handed_over(fault: str, seed: int) -> bool:
    """Whether the kernel copies."""
    x = torch.randn(TILES * ROWS, generator=torch.Generator().manual_seed(0))
    out = torch.zeros_like(x)
    with interpreted(seed, also=sys.modules[__name__]):
        _handed_over_kernel[(1,)](x, out, fault=fault)
    return torch.equal(out, x)


def test_a_barrier_tells_when_a_warp_s_copies_are_there():
    assert all(handed_over("", seed) for seed in range(8))


@pytest.mark.parametrize("fault", ["reads early", "does not wait"])
def test_a_copy_to_where_another_has_not_arrived_is_found(fault):
    with pytest.raises(AssertionError, match="two copies to one place"):
        all(handed_over(fault, seed) for seed in range(8))


@gluon.jit
def _follow(a, b, c, d):
    return a + c, d


@gluon.jit
def _sums_kernel(x, out):
    row = gl.arange(0, ROWS, layout=None)
    values = gl.load(x + row[:, None] * 4 + gl.arange(0, 4, layout=None)[None, :])
    total, last = gl.reduce((values, values), 1, _follow)
    gl.store(out + row, total)
    gl.store(out + ROWS + row, gl.sum(values, 1))
    gl.store(out + 2 * ROWS + row, last)


def test_sums_are_folds_in_order():
    """Of sums in fp32, and of any other combination."""
    x, out = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(3, ROWS)
    with interpreted(also=sys.modules[__name__]):
        _sums_kernel[(1,)](x, out)
    folded = x[:, 0] + x[:, 1] + x[:, 2] + x[:, 3]
    assert torch.equal(out, torch.stack((folded, folded, x[:, 3])))
    assert not torch.equal(folded, x.double().sum(1).float())

"""Plans from host memory and verdicts to it, by kernels inside a captured step.

A copy beside a graph costs both a gap on the device. The host memory is pinned, so that a GPU
reaches it by its address. The reference is ``reference``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.overlap import overlapped, wait_for_earlier


@triton.jit(do_not_specialize=["num_entries", "entry_size", "size"])
def _fetch_kernel(
    entries,  # [num_entries, entry_size], in host memory
    turn,  # [1], written
    plan,  # [size], written
    num_entries,
    entry_size,
    size,
    BLOCK: tl.constexpr,
):
    now = tl.load(turn)
    entry = entries + (now % num_entries) * entry_size
    place = tl.arange(0, BLOCK)
    # Never from a cache: the host writes entries again.
    value = tl.load(entry + place, place < size, other=0, cache_modifier=".cv")
    tl.store(plan + place, value, place < size)
    # No thread may still have to read what another one writes.
    tl.debug_barrier()
    tl.store(turn, now + 1)


@triton.jit(do_not_specialize=["row_stride"])
def _deliver_kernel(
    outcome,  # [B, W]
    places,  # [B]
    rows,  # [R, row_stride], in host memory, written
    row_stride,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    plan_row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + plan_row)
    column = tl.arange(0, BLOCK)
    value = tl.load(outcome + plan_row * W + column, column < W, other=0)
    tl.store(rows + place * row_stride + column, value, (column < W) & (place >= 0))


def fetch(entries: Tensor, turn: Tensor, plan: Tensor) -> None:
    """Read the entry of this turn into ``plan``, and count the turn.

    Args:
        entries: [N, E] int64 in host memory that the device reaches.
        turn: [1] int64: how often the device has fetched; the entry is its remainder by N.
        plan: int64 of at most E elements, contiguous.
    """
    assert entries.is_contiguous()
    assert plan.is_contiguous()
    assert plan.numel() <= entries.shape[1]
    _fetch_kernel[(1,)](
        entries,
        turn,
        plan,
        entries.shape[0],
        entries.shape[1],
        plan.numel(),
        BLOCK=triton.next_power_of_2(plan.numel()),
        num_warps=1,
    )


def deliver(outcome: Tensor, places: Tensor, rows: Tensor) -> None:
    """Write each row of ``outcome`` to its place among the host's rows.

    Args:
        outcome: [B, W] int64, contiguous.
        places: [B] int64; below 0 for rows that nobody waits for.
        rows: [R, >= W] int64 in host memory that the device reaches.
    """
    assert outcome.is_contiguous()
    assert rows.stride(1) == 1
    batch, width = outcome.shape
    assert width <= rows.shape[1]
    _deliver_kernel[(batch,)](
        outcome,
        places,
        rows,
        rows.stride(0),
        W=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
        **overlapped(outcome),
    )

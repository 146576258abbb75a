"""Layouts from host memory and results to it, by kernels inside a captured step.

A copy beside a graph costs both a gap on the device. The host memory is pinned, so that a GPU
reaches it by its address. Contracts: ``ops.StepOps``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.overlap import overlapped, wait_for_earlier
from sametoken.kernels.step import types
from sametoken.kernels.step.types import NUM_COUNTS, StepInputs, VerifyResult

_COUNTS = tl.constexpr(types.NUM_COUNTS)
#: Integers that one warp reads.
_PER_WARP = 512


@triton.jit(do_not_specialize=["num_entries", "entry_size", "size"])
def _fetch_kernel(
    entries,  # [num_entries, entry_size], in host memory
    turn,  # [1], written
    table,  # [size], written
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
    tl.store(table + place, value, place < size)
    # No thread may still have to read what another one writes.
    tl.debug_barrier()
    tl.store(turn, now + 1)


@triton.jit(do_not_specialize=["row_stride"])
def _deliver_kernel(
    step_ids,  # [B]
    places,  # [B]
    num_drafts,  # [B]
    num_proposed,  # [B]
    num_accepted,  # [B]
    faults,  # [B]
    window_starts,  # [B + 1]
    tokens,  # [L]
    results,  # [R, row_stride], in host memory, written
    row_stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    request = tl.program_id(0).to(tl.int64)
    place = tl.load(places + request)
    first, stop = tl.load(window_starts + request), tl.load(window_starts + request + 1)
    result = results + place * row_stride
    awaited = place >= 0
    tl.store(result, tl.load(step_ids + request), awaited)
    tl.store(result + 1, tl.load(num_drafts + request), awaited)
    tl.store(result + 2, tl.load(num_proposed + request), awaited)
    tl.store(result + 3, tl.load(num_accepted + request), awaited)
    tl.store(result + 4, tl.load(faults + request), awaited)
    row = tl.arange(0, BLOCK)
    inside = row < stop - first
    token = tl.load(tokens + first + row, inside, other=0)
    tl.store(result + _COUNTS + row, token, inside & awaited)


def fetch(entries: Tensor, turn: Tensor, table: Tensor) -> None:
    """See ``StepOps.fetch``."""
    assert entries.is_contiguous()
    assert table.is_contiguous()
    assert table.numel() <= entries.shape[1]
    _fetch_kernel[(1,)](
        entries,
        turn,
        table,
        entries.shape[0],
        entries.shape[1],
        table.numel(),
        BLOCK=triton.next_power_of_2(table.numel()),
        num_warps=4 if table.numel() > _PER_WARP else 1,
    )


def deliver(x: StepInputs, verdict: VerifyResult, results: Tensor) -> None:
    """See ``StepOps.deliver``."""
    assert results.stride(1) == 1
    assert results.shape[1] >= NUM_COUNTS + x.max_num_drafts + 1
    _deliver_kernel[(x.slots.shape[0],)](
        x.step_ids,
        x.places,
        x.num_drafts,
        x.num_proposed,
        verdict.num_accepted,
        verdict.faults,
        x.window_starts,
        verdict.tokens,
        results,
        results.stride(0),
        BLOCK=triton.next_power_of_2(x.max_num_drafts + 1),
        num_warps=1,
        **overlapped(x.slots),
    )

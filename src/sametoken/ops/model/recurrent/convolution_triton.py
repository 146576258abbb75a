"""The short convolution of a pass's rows on a GPU, and where their raw rows are, for every rule."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from sametoken.ops.backend import RunGroup
from sametoken.ops.launch_sizes import next_power_of_2
from sametoken.ops.model.recurrent.rule import LayerMemory
from sametoken.ops.model.recurrent.runs import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    NUM_FOLDED,
    NUM_ROWS,
    SLOT,
    fact,
)
from sametoken.ops.pdl import gdc_wait

_LOG2_E = tl.constexpr(1.4426950408889634)
# Programs of a launch; each runs several rows if there are more.
_PROGRAMS = 4096
# Runs among which a program looks for its own, at least: one compiled form for usual engines.
_BLOCK_RUNS = 256


@dataclass(frozen=True, slots=True)
class Parts:
    """How a launch cuts the rows of a group of runs into parts, each a program's for some channels.

    Attributes:
        grid: programs by part and by run.
        each: rows of a part; 0: a run's rows are spread evenly over the parts.
        block_runs: if ``each`` is set, a power of two, no fewer than the group's runs; in an engine
            one number, whatever the step, for one kernel.
    """

    grid: tuple[int, int]
    each: int
    block_runs: int


def parts_of(group: RunGroup, num_rows: int, memory: LayerMemory, units: int) -> Parts:
    """For ``units`` blocks of channels, in a pass of ``num_rows`` rows.

    A run of every length gets as many parts, unless that would give most of them to runs with few
    rows or none, as padded steps have: then a program looks for its run among all.
    """
    most_rows = group.max_rows + memory.max_pending
    if group.num_runs * group.max_rows <= 2 * num_rows:
        most = max(1, _PROGRAMS // (units * group.num_runs))
        return Parts((min(most_rows, most), group.num_runs), 0, 0)
    all_rows = num_rows + group.num_runs * memory.max_pending
    each = triton.cdiv(units * all_rows, _PROGRAMS)
    parts = all_rows // each + group.num_runs
    block_runs = max(_BLOCK_RUNS, next_power_of_2(max(memory.max_runs, group.num_runs)))
    return Parts((parts, 1), each, block_runs)


@triton.jit
def own_part(runs, first_run, num_runs, each, BLOCK_RUNS: tl.constexpr):
    """This program's run and part of ``Parts``; parts beyond a run's last have no rows."""
    part = tl.program_id(1)
    run = first_run + tl.program_id(2).to(tl.int64)
    if BLOCK_RUNS:
        index = tl.arange(0, BLOCK_RUNS)
        inside = index < num_runs
        field = runs + (first_run + index) * FIELDS
        rows = tl.load(field + NUM_ROWS, inside, other=0).to(tl.int32)
        folded = tl.load(field + NUM_FOLDED, inside, other=0).to(tl.int32)
        parts = tl.where(rows > 0, (rows + folded + each - 1) // each, 0)
        following = tl.cumsum(parts, 0)
        is_own = (following - parts <= part) & (part < following)
        run += tl.sum(tl.where(is_own, index, 0), 0)
        part -= tl.sum(tl.where(is_own, following - parts, 0), 0)
    return run, part


@triton.jit
def rows_to_prepare(
    field,  # [FIELDS] of the run
    part,  # of own_part
    each,
    mixed,  # [T, C], rows mixed_stride apart
    history,  # [S, K - 1, C]
    pending,  # [S, P, C]
    mixed_stride,
    max_pending,
    C: tl.constexpr,
    K: tl.constexpr,
):
    """A run's raw rows for the other functions here, the part's span of rows, and facts.

    The facts are the slot, its first row in the pass, and its number of folded rows. Stored and
    new rows are indexed from the oldest of the history. ``plan_runs`` is a PDL barrier, so the
    table is complete.
    """
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows, num_folded = fact(field, NUM_ROWS).to(tl.int32), fact(field, NUM_FOLDED).to(tl.int32)
    empty = fact(field, EMPTY) != 0
    total = tl.where(num_rows > 0, num_folded + num_rows, 0)
    each = tl.where(each > 0, each, tl.cdiv(total, tl.num_programs(1)))
    begin = part * each
    num_held = num_folded + K - 1
    raw = (
        mixed, mixed_stride, history + slot * (K - 1) * C,
        pending + (slot * max_pending - (K - 1)) * C, first_row - num_held,
        num_held, total + K - 1, empty,
    )  # fmt: skip
    return raw, (begin, tl.minimum(total, begin + each)), (slot, first_row, num_folded)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which does not overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    # 1 / y as the square of rsqrt(y): cheaper than a division, which handles all ranges.
    root = tl.rsqrt(1.0 + tl.exp2(x * -_LOG2_E))
    return root * root


@triton.jit
def conv_weights(conv_weight, conv_bias, channel, inside, C: tl.constexpr, K: tl.constexpr):
    """The convolution's K weights and bias of some channels, fp32 in the shape of ``channel``."""
    weights = ()
    for tap in tl.static_range(K):
        weight = tl.load(conv_weight + tap * C + channel, inside, other=0.0)
        weights += (weight.to(tl.float32),)  # type: ignore[assignment]
    bias = tl.zeros(channel.shape, tl.float32)
    if conv_bias is not None:
        bias = tl.load(conv_bias + channel, inside, other=0.0).to(tl.float32)
    return weights, bias


@triton.jit
def convolved(rows, newest, weights, bias, K: tl.constexpr):
    """SiLU of the convolution of K - 1 raw rows and the newest one, taps in order."""
    rows += (newest,)
    summed = rows[0] * weights[0]
    for tap in tl.static_range(1, K):
        summed = tl.fma(rows[tap], weights[tap], summed)
    summed += bias
    return summed * sigmoid(summed)


@triton.jit
def held_rows(raw, begin, channel, inside, C: tl.constexpr, K: tl.constexpr):
    """The slot's stored rows among the K - 1 raw rows from ``begin``; zeros for the others.

    Raw rows are counted from the oldest of the history. The previous pass wrote the stored rows
    before ``plan_runs``, a PDL barrier, so no wait is needed.
    """
    _, _, history, pending, _, num_held, _, empty = raw
    rows = ()
    for tap in tl.static_range(K - 1):
        index = begin + tap
        at = tl.where(index < K - 1, history + index * C, pending + index * C)
        # Inputs before a request's first row are zero.
        exists = (index < num_held) & ((index >= K - 1) | (empty == 0))
        rows += (tl.load(at + channel, exists & inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return rows


@triton.jit
def completed_rows(rows, raw, begin, channel, inside, K: tl.constexpr):
    """Add the pass's rows to those of ``held_rows``: all K - 1 raw rows from ``begin``."""
    mixed, stride, _, _, first_new, num_held, stop, _ = raw
    completed = ()
    for tap in tl.static_range(K - 1):
        index = begin + tap
        is_new = (index >= num_held) & (index < stop)
        new = tl.load(mixed + (first_new + index) * stride + channel, is_new & inside, other=0.0)
        completed += (tl.where(is_new, new.to(tl.float32), rows[tap]),)  # type: ignore[assignment]
    return completed


@triton.jit
def moved_on(rows, newest):
    """The K - 1 raw rows before the next one."""
    rows += (newest,)
    return rows[1:]


@triton.jit
def pending_or_new(raw, index, C: tl.constexpr):
    """Pointer to a raw row after the history; ``keep._raw_row`` covers all raw rows."""
    mixed, stride, _, pending, first_new, num_held, _, _ = raw
    return tl.where(index < num_held, pending + index * C, mixed + (first_new + index) * stride)


@triton.jit
def convolve_channels(
    first,  # channel
    raw,
    span,
    prepared,
    conv_weight,
    conv_bias,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of a run's rows, in order, without anything after the SiLU."""
    channel = first + tl.arange(0, BLOCK)
    inside = channel < C
    weights, bias = conv_weights(conv_weight, conv_bias, channel, inside, C, K)
    begin, end = span
    rows = held_rows(raw, begin, channel, inside, C, K)
    gdc_wait(PDL)
    rows = completed_rows(rows, raw, begin, channel, inside, K)
    for t in range(begin, end):
        at = pending_or_new(raw, t + K - 1, C)
        newest = tl.load(at + channel, inside, other=0.0).to(tl.float32)
        v = convolved(rows, newest, weights, bias, K)
        tl.store(prepared + t * WIDTH + channel, v, inside)
        rows = moved_on(rows, newest)

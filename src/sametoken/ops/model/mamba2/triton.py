"""Mamba-2 without its projections, in Triton: one row function, folded by position.

As Gated DeltaNet (``gated_delta_rule.triton``): ``plan_runs`` says which rows a slot folds,
commits and leaves pending; per layer, ``prepare`` turns raw rows into the rule's inputs, and
``advance`` scans them sequentially with the state in registers, read and written once. No compiled
kernel depends on row counts, windows or batches, and one loop runs all rows.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.mamba2.prepare import prepare
from sametoken.ops.model.mamba2.rule import Mamba2Params
from sametoken.ops.model.recurrent.keep import KEPT_CHANNELS, keep_raw, num_keepers
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import (
    BROKEN,
    EMPTY,
    FIELDS,
    FIRST_ROW,
    NUM_FOLDED,
    NUM_LASTING,
    NUM_ROWS,
    SLOT,
    STOP_ROW,
    Runs,
    fact,
)
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options

# From this number of rows on, an uneven number of programs per multiprocessor costs more than an
# early start (PDL) saves.
_LONG = 128
# Depth of the load pipeline of prepared rows.
_STAGES = 4


@dataclass(frozen=True, slots=True)
class ScanTile:
    """The tile of a head's state that a program holds. It affects bits: an engine uses one.

    Attributes:
        rows: rows of the state, each with all its N columns.
        num_warps: per program.
    """

    rows: int = 32
    num_warps: int = 2


@triton.jit
def _columns(COLUMNS: tl.constexpr):
    """[LANES, 1, RUNS, TOGETHER]: a thread's columns are in runs of four, loaded together.

    Eight threads share a row of the state, so that most of a row's sum is within a thread.
    """
    TOGETHER: tl.constexpr = min(4, COLUMNS)
    LANES: tl.constexpr = min(8, COLUMNS // TOGETHER)
    RUNS: tl.constexpr = COLUMNS // (LANES * TOGETHER)
    lane = tl.arange(0, LANES)[:, None, None, None]
    run = tl.arange(0, RUNS)[None, None, :, None]
    return (run * LANES + lane) * TOGETHER + tl.arange(0, TOGETHER)[None, None, None, :]


@triton.jit
def _read(state, c):
    """Sum over the columns of state [LANES, ROWS, RUNS, TOGETHER] times c [.., 1, .., ..]: [ROWS].

    Every rounding is explicit and not left to the compiler.
    """
    state, c = tl.broadcast(state, c)
    products = tl.fma(state, c, tl.zeros(state.shape, tl.float32))
    return tl.sum(tl.sum(tl.sum(products, axis=3), axis=2), axis=0)


@triton.jit
def _scan_tile(
    tile,
    run,
    prepared,  # [T + B * P, WIDTH]
    skip,  # [H]
    field,  # [FIELDS] of the run
    states,  # [S, H, P, N]
    out,  # [T, H * P]
    max_pending,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequential scan of a run's rows over some rows of one head's state."""
    TILES: tl.constexpr = (P + ROWS - 1) // ROWS
    C: tl.constexpr = H * P + 2 * G * N
    WIDTH: tl.constexpr = C + 2 * H
    head = tile // TILES
    group = head // (H // G)
    element = (tile % TILES) * ROWS + tl.arange(0, ROWS)
    column, of_row = _columns(COLUMNS), element[None, :, None, None]
    is_element, is_column = element < P, column < N
    inside = (of_row < P) & is_column

    # All loads together: dependent loads would cost as much as the row itself.
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows, stop_row = fact(field, NUM_ROWS).to(tl.int32), fact(field, STOP_ROW)
    num_folded, num_lasting = fact(field, NUM_FOLDED).to(tl.int32), fact(field, NUM_LASTING)
    empty, broken = fact(field, EMPTY) != 0, fact(field, BROKEN) != 0
    state_at = states + (slot * H + head) * P * N + of_row * N + column
    exists = inside & (empty == 0) & (num_rows > 0)
    state = tl.load(state_at, exists, other=0.0, cache_modifier=".cg")
    factor = tl.load(skip + head).to(tl.float32)
    # No other kernel writes the layer's states between ``plan_runs``, a PDL barrier, and here.
    gdc_wait(PDL)

    prepared += (first_row + run * max_pending) * WIDTH
    x_at, decay_at = prepared + head * P + element, prepared + C + head
    b_at = prepared + H * P + group * N + column
    out += first_row * H * P + head * P + element
    # One loop without branches, so that folded and new rows run the same instructions; the output
    # of folded rows is not stored.
    for t in tl.range(num_folded + num_rows, num_stages=STAGES):
        at, is_new = t * WIDTH, t >= num_folded
        x = tl.load(x_at + at, is_element, other=0.0)
        b = tl.load(b_at + at, is_column, other=0.0)
        c = tl.load(b_at + at + G * N, is_column, other=0.0)
        decay, step = tl.load(decay_at + at), tl.load(decay_at + at + H)
        change, b = tl.broadcast((step * x)[None, :, None, None], b)
        state = tl.fma(change, b, decay * state)
        read = tl.fma(factor, x, _read(state, c)).to(out.dtype.element_ty)
        tl.store(out + (t - num_folded) * H * P, read, is_element & is_new)
        if t + 1 == num_lasting:
            tl.store(state_at, state, inside)

    # Dead rows are zeros; all rows of a broken run are NaN.
    fill = tl.zeros((ROWS,), tl.float32) + tl.where(broken, float("nan"), 0.0)
    for row in range(num_rows, (stop_row - first_row).to(tl.int32)):
        tl.store(out + row * H * P, fill.to(out.dtype.element_ty), is_element)


@triton.jit(do_not_specialize=["max_pending"])
def _advance_kernel(
    prepared,  # [T + B * P, WIDTH]
    mixed,  # [T, C], rows mixed_stride apart
    dt,  # [T, H], rows dt_stride apart
    skip,  # [H]
    runs,  # [B, FIELDS]
    states,  # [S, H, P, N], written
    history,  # [S, K - 1, C], written
    pending_mixed,  # [S, P, C], written
    pending_gates,  # [S, P, H], written
    out,  # [T, H * P], written
    mixed_stride,
    dt_stride,
    max_pending,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    C: tl.constexpr = H * P + 2 * G * N
    PROGRAMS: tl.constexpr = H * ((P + ROWS - 1) // ROWS)
    program = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    field = runs + run * FIELDS
    if program < PROGRAMS:
        _scan_tile(
            program, run, prepared, skip, field, states, out, max_pending,
            H, P, G, N, ROWS, COLUMNS, STAGES, PDL,
        )  # fmt: skip
    else:
        keep_raw(
            program - PROGRAMS, tl.num_programs(0) - PROGRAMS, mixed, dt, None, field,
            history, pending_mixed, pending_gates, mixed_stride, dt_stride, dt_stride, max_pending,
            C, H, K, KEPT_BLOCK, HEADS, TAPS_BLOCK, PDL,
        )  # fmt: skip


def advance(
    runs: Runs,
    params: Mamba2Params,
    raw: RawRows,
    memory: LayerMemory,
    tile: ScanTile | None = None,
) -> Tensor:
    """Convolution and state space rule of a pass's rows in one layer: [T, H * P].

    Sums run in fp32 and round once, to the dtype of the raw rows. Dead rows of a run are zero;
    rows after the last run are not written.

    Args:
        runs: of the pass.
        params: the layer's weights.
        raw: the rows, in the dtype of ``memory``.
        memory: the slots' memory in the layer; written.
        tile: of states; the same in all passes.
    """
    rule, num_rows = params.rule, raw.mixed.shape[0]
    out = raw.mixed.new_empty(num_rows, rule.out_features)
    if not runs.rows.count:
        return out
    assert raw.mixed.dtype == memory.history.dtype
    assert params.D.is_contiguous()
    prepared = prepare(runs, params, raw, memory)
    tile = tile or ScanTile()
    rows = min(tile.rows, triton.next_power_of_2(rule.head_dim))
    batch, programs = runs.table.shape[0], rule.num_heads * triton.cdiv(rule.head_dim, rows)
    block = KEPT_CHANNELS * tile.num_warps
    blocks = triton.cdiv(rule.conv_channels, block)
    long = runs.rows.max_rows >= _LONG
    keepers = num_keepers(programs, batch, tile.num_warps, blocks, long)
    _advance_kernel[(programs + keepers, batch)](
        prepared,
        raw.mixed,
        *raw.gates,
        params.D,
        runs.table,
        memory.states,
        memory.history,
        memory.pending_mixed,
        memory.pending_gates,
        out,
        *raw.strides,
        memory.max_pending,
        **rule.constants,
        ROWS=rows,
        COLUMNS=triton.next_power_of_2(rule.state_dim),
        HEADS=triton.next_power_of_2(rule.num_heads),
        KEPT_BLOCK=block,
        TAPS_BLOCK=triton.next_power_of_2(max(rule.conv_kernel - 1, 1)),
        STAGES=_STAGES,
        num_warps=tile.num_warps,
        **pdl_options(out, early=not long),
    )
    return out

"""Mamba-2 without its projections, in Triton: one row function, folded by position.

As Gated DeltaNet (``gated_delta_rule.triton``): ``plan_runs`` says which rows a slot folds,
commits and leaves pending; per layer, ``prepare`` turns raw rows into the rule's inputs, and
``advance`` scans them sequentially with the state in registers, read and written once. One loop
runs all rows. The numbers of rows and states choose how a state is cut into tiles; sums have one
order in every tile. On Hopper, ``hopper`` walks long runs, with the same operations in the same
order. Prompts in the fast form run by ``chunks``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import RowRuns
from sametoken.ops.model.mamba2 import hopper
from sametoken.ops.model.mamba2.chunks import advance_chunks
from sametoken.ops.model.mamba2.prepare import prepare
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.model.recurrent.keep import KEPT_CHANNELS, keep_raw, num_keepers
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import EXACT_ROWS, FIELDS, Runs, facts, fill_dead
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options
from sametoken.ops.triton_versions import LAST_AXIS_FIRST

# Threads that share a row of the state, and columns that each loads at once.
_LANES, _TOGETHER = 8, tl.constexpr(4)
_LAST_FIRST = tl.constexpr(LAST_AXIS_FIRST)
# Threads of a warp.
_THREADS = 32


@dataclass(frozen=True, slots=True)
class ScanTile:
    """The tile of a head's state that a program holds. It does not affect bits.

    Attributes:
        rows: rows of the state, each with all its N columns; at least four per warp.
        num_warps: per program.
        ahead: prepared rows that are loaded ahead of their use; at most eight.
    """

    rows: int
    num_warps: int
    ahead: int

    def fitted(self, head_dim: int, lanes: int) -> ScanTile:
        """This tile, limited to a head's rows, with no more threads than load columns at once.

        Otherwise several threads would share these columns, and add them in another order.
        """
        rows = min(self.rows, triton.next_power_of_2(head_dim))
        num_warps = min(self.num_warps, max(1, rows * lanes // _THREADS))
        return ScanTile(rows, num_warps, min(self.ahead, lanes))


# Large tiles run the fewest instructions per element and suit states that fill the GPU; small ones
# run a row sooner and suit fewer states, unless the pass has one row of each.
_LARGE, _SMALL = ScanTile(64, 4, 1), ScanTile(32, 4, 4)
# Heads of all runs, whose states fill it.
_FULL = 512


def choose(rule: Mamba2, num_rows: int, runs: RowRuns, max_runs: int) -> ScanTile:
    """What suits a pass of ``num_rows`` rows.

    Padded steps have runs without any: at most ``max_runs`` have rows.
    """
    runs_at_once = runs.count if num_rows < EXACT_ROWS else num_rows // max(1, runs.max_rows)
    heads = rule.num_heads * min(runs_at_once, max_runs)
    return _LARGE if heads >= _FULL or runs.max_rows == 1 else _SMALL


@triton.jit
def _dealt(tensor):
    """[LANES, ROWS, ...] in the order that gives lanes neighbouring threads, and back."""
    if _LAST_FIRST:
        tensor = tl.permute(tensor, (1, 0, 2))
    return tensor


@triton.jit
def _load_row(at, offset, is_element, is_column):
    """A prepared row's parts for a tile: x [LANES, ROWS, 1], decay, step, B and C.

    B and C are [LANES, 1, TOGETHER] per part of the columns. Every thread loads what it needs, from
    L1 what another thread has loaded, so that no barrier stands between rows.
    """
    x_at, b_at, c_at, decay_at, H = at
    LANES: tl.constexpr = b_at.shape[0]
    TOGETHER: tl.constexpr = b_at.shape[2]
    x = tl.load(x_at + offset, is_element, other=0.0)
    x = tl.broadcast_to(x, LANES, x.shape[1], 1)
    decay, step = tl.load(decay_at + offset), tl.load(decay_at + offset + H)
    b, c = (), ()
    for part in tl.static_range(len(is_column)):
        inside, shift = is_column[part], offset + part * LANES * TOGETHER
        b += (tl.load(b_at + shift, inside, other=0.0),)  # type: ignore[assignment]
        c += (tl.load(c_at + shift, inside, other=0.0),)  # type: ignore[assignment]
    return x, decay, step, b, c


@triton.jit
def _load_first(at, last, is_element, is_column, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """The first rows up to the last one, which fills the rest."""
    rows = ()
    for ahead in tl.static_range(AHEAD):
        offset = tl.minimum(ahead, last) * WIDTH
        rows += (_load_row(at, offset, is_element, is_column),)  # type: ignore[assignment]
    return rows


@triton.jit
def _updated(state, row):
    """The state after a row."""
    x, decay, step, b, _ = row
    change, _ = tl.broadcast(step * x, state[0])
    updated = ()
    for part in tl.static_range(len(state)):
        along, _ = tl.broadcast(b[part], state[0])
        updated += (tl.fma(change, along, decay * state[part]),)  # type: ignore[assignment]
    return updated


@triton.jit
def _read(state, row, factor):
    """A row's output: the sum over the columns of the state times C, and factor * x.

    Every rounding is explicit and not left to the compiler. A thread adds each of its TOGETHER
    columns over the parts, then these, then lanes add theirs, in one order for every tile.
    """
    x, _, _, _, c = row
    total = tl.zeros(state[0].shape, tl.float32)
    for part in tl.static_range(len(state)):
        along, _ = tl.broadcast(c[part], state[0])
        total = tl.fma(state[part], along, total)
    total = tl.sum(tl.sum(total, axis=2, keep_dims=True), axis=0, keep_dims=True)
    return tl.fma(factor, x, tl.broadcast_to(total, x.shape))


@triton.jit
def _scan_rows(
    state,
    place,  # addresses of its first part, and what exists
    at,  # addresses of a prepared row's parts
    ends,  # of folded, lasting and all rows
    factor,
    out,  # of the first new row
    target,  # [LANES, ROWS, 1], offsets of outputs; lane i stores row i of a group
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Run folded and new rows; store the state after the lasting ones."""
    state_at, is_element, is_column = place
    LANES: tl.constexpr = state_at.shape[0]
    STRIDE: tl.constexpr = LANES * state_at.shape[2]
    num_folded, num_lasting, total = ends
    lane = tl.arange(0, LANES)[:, None, None]
    # A run without rows reads one too.
    last = tl.maximum(total, 1) - 1
    rows = _load_first(at, last, is_element, is_column, WIDTH, AHEAD)
    # Folded rows run the instructions of new ones, without the read.
    for first in tl.range(0, total, AHEAD, num_stages=1):
        reads = tl.zeros(target.shape, tl.float32)
        for ahead in tl.static_range(AHEAD):
            t = first + ahead
            if t < total:
                state = _updated(state, rows[0])
                if t >= num_folded:
                    reads = tl.where(lane == ahead, _read(state, rows[0], factor), reads)
                if t + 1 == num_lasting:
                    for part in tl.static_range(len(is_column)):
                        inside = _dealt(is_element & is_column[part])
                        tl.store(_dealt(state_at + part * STRIDE), _dealt(state[part]), inside)
            offset = tl.minimum(t + AHEAD, last) * WIDTH
            rows += (_load_row(at, offset, is_element, is_column),)
            rows = rows[1:]
        t = first + lane
        is_new = (lane < AHEAD) & (t >= num_folded) & (t < total)
        target_at = _dealt(out + (first - num_folded) * OUT_WIDTH + target)
        reads = _dealt(reads.to(out.dtype.element_ty))
        tl.store(target_at, reads, _dealt(is_element & is_new))


@triton.jit
def _scan_tile(
    tile,
    run,
    prepared,  # [T + B * P + 1, WIDTH]
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
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequential scan of a run's rows over some rows of one head's state."""
    TILES: tl.constexpr = triton.cdiv(P, ROWS)
    C: tl.constexpr = H * P + 2 * G * N
    WIDTH: tl.constexpr = C + 2 * H
    TOGETHER: tl.constexpr = min(_TOGETHER, COLUMNS)
    STRIDE: tl.constexpr = LANES * TOGETHER
    head = tile // TILES
    group = head // (H // G)
    # [LANES, ROWS, TOGETHER] is a part of the columns of the state.
    lane = tl.arange(0, LANES)[:, None, None]
    element = (tile % TILES) * ROWS + tl.arange(0, ROWS)[None, :, None]
    column = lane * TOGETHER + tl.arange(0, TOGETHER)[None, None, :]
    is_element, is_column = element < P, ()
    for part in tl.static_range(COLUMNS // STRIDE):
        is_column += (column + part * STRIDE < N,)  # type: ignore[assignment]

    slot, first_row, num_rows, stop_row, num_folded, num_lasting, empty, broken = facts(field)
    state_at = states + (slot * H + head) * P * N + element * N + column
    exists, state = is_element & (empty == 0) & (num_rows > 0), ()
    for part in tl.static_range(len(is_column)):
        at, inside = _dealt(state_at + part * STRIDE), _dealt(exists & is_column[part])
        loaded = tl.load(at, inside, other=0.0, cache_modifier=".cg")
        state += (_dealt(loaded),)  # type: ignore[assignment]
    factor = tl.load(skip + head).to(tl.float32)
    # No other kernel writes the layer's states between ``plan_runs``, a PDL barrier, and here.
    gdc_wait(PDL)

    prepared += (first_row + run * max_pending) * WIDTH
    b_at = prepared + H * P + group * N + column
    at = (prepared + head * P + element, b_at, b_at + G * N, prepared + C + head, H)
    out += first_row * H * P + head * P
    # The hint keeps outputs in their threads; otherwise they pass through shared memory, to be
    # stored side by side.
    target = tl.max_contiguous(lane * (H * P) + element, [1, 1, 1])
    place = (state_at, is_element, is_column)
    _scan_rows(
        state, place, at, (num_folded, num_lasting.to(tl.int32), num_folded + num_rows),
        factor, out, target, WIDTH, H * P, AHEAD,
    )  # fmt: skip
    stop = (stop_row - first_row).to(tl.int32)
    fill_dead(out + element, num_rows, stop, broken, is_element, H * P)


@triton.jit(do_not_specialize=["max_pending", "num_short", "num_walked"])
def _advance_kernel(
    prepared,  # [T + B * P + 1, WIDTH]
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
    num_short,  # runs
    num_walked,  # leading runs whose rows are walked here
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    C: tl.constexpr = H * P + 2 * G * N
    PROGRAMS: tl.constexpr = H * triton.cdiv(P, ROWS)
    program = tl.program_id(0)
    # Long runs, which come last, start first.
    run = ((tl.program_id(1) + num_short) % tl.num_programs(1)).to(tl.int64)
    field = runs + run * FIELDS
    if program >= PROGRAMS:
        keep_raw(
            program - PROGRAMS, tl.num_programs(0) - PROGRAMS, mixed, dt, None, field,
            history, pending_mixed, pending_gates, mixed_stride, dt_stride, dt_stride, max_pending,
            C, H, K, KEPT_BLOCK, PDL,
        )  # fmt: skip
    elif run < num_walked:
        _scan_tile(
            program, run, prepared, skip, field, states, out, max_pending,
            H, P, G, N, ROWS, COLUMNS, LANES, AHEAD, PDL,
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
        tile: of states; by default what suits their number and the rows of a run.
    """
    rule, num_rows = params.rule, raw.mixed.shape[0]
    out = raw.mixed.new_empty(num_rows, rule.out_features)
    if not runs.rows.count:
        return out
    assert raw.mixed.dtype == memory.history.dtype
    assert params.D.is_contiguous()
    if runs.fast:
        # First, as the rows that it prepares need no memory beside those to walk.
        advance_chunks(runs.fast, params, raw, memory, out)
    prepared = prepare(runs, params, raw, memory)
    batch = runs.table.shape[0]
    on_hopper = tile is None and hopper.serves(runs, rule, prepared)
    columns = triton.next_power_of_2(rule.state_dim)
    lanes = min(_LANES, columns // min(_TOGETHER.value, columns))
    tile = tile or choose(rule, num_rows, runs.rows, memory.max_runs)
    tile = tile.fitted(rule.head_dim, lanes)
    programs, long = rule.num_heads * triton.cdiv(rule.head_dim, tile.rows), runs.are_long
    keepers = num_keepers(programs, batch, tile.num_warps, rule.conv_channels, long=long)
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
        runs.rows.num_short,
        runs.rows.num_short if on_hopper else batch,
        **rule.constants,
        ROWS=tile.rows,
        COLUMNS=columns,
        LANES=lanes,
        KEPT_BLOCK=KEPT_CHANNELS * tile.num_warps,
        AHEAD=tile.ahead,
        num_warps=tile.num_warps,
        **pdl_options(out, early=not long),
    )
    if on_hopper:
        hopper.walk(runs, params, prepared, memory, out)
    return out

"""Gated DeltaNet without its projections, in Triton: one row function, folded by position.

A pass has three kinds of launch. ``plan_runs`` derives from positions the rows that each slot
folds, commits and leaves pending. Per layer, ``prepare`` turns raw rows, pending ones included,
into the inputs of the rule, and ``advance`` scans them sequentially with the state in registers:
first folded rows, then new ones, which also produce output. No compiled kernel depends on row
counts, windows or batches, and one loop runs all rows, so decode, verify, fold and prefill run the
same instructions and give a row the same bits.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.gated_delta_rule.prepare import prepare
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
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

# State elements that a warp reads per load: 16 bytes per thread.
_FLOATS_PER_WARP = 128
# From this number of rows on, an uneven number of programs per multiprocessor costs more than an
# early start (PDL) saves.
_LONG = 128
# Depth of the load pipeline of prepared rows.
_STAGES = 4


@dataclass(frozen=True, slots=True)
class RuleTile:
    """The tile of a state that a program holds. It affects bits: an engine uses one.

    Attributes:
        value_columns: columns of a head's state per warp.
        num_warps: per program; every warp has separate columns.
        max_registers: per thread; fewer registers raise occupancy. None: the compiler's choice.
    """

    value_columns: int = 32
    num_warps: int = 2
    max_registers: int | None = None

    def fitted(self, value_dim: int) -> RuleTile:
        """This tile, limited to the columns of a state."""
        most = triton.next_power_of_2(value_dim)
        columns = min(self.value_columns, most)
        return replace(self, value_columns=columns, num_warps=min(self.num_warps, most // columns))


@triton.jit
def _keys(BK: tl.constexpr, LANES: tl.constexpr):
    """[LANES, 1, RUNS, TOGETHER]: a thread's keys are in runs of four, loaded together."""
    TOGETHER: tl.constexpr = min(4, BK // LANES)
    RUNS: tl.constexpr = BK // (LANES * TOGETHER)
    lane = tl.arange(0, LANES)[:, None, None, None]
    run = tl.arange(0, RUNS)[None, None, :, None]
    return (run * LANES + lane) * TOGETHER + tl.arange(0, TOGETHER)[None, None, None, :]


@triton.jit
def _add_product(factor, total, a, b):
    """Add a product to the running sum factor * total with one rounding."""
    return 1.0, tl.fma(a, b, factor * total)


@triton.jit
def _along(state, part):
    """Sum over keys of state [LANES, WARPS, RUNS, TOGETHER, V] times part [.., 1]: [WARPS, V].

    Every rounding is explicit and not left to the compiler.
    """
    state, part = tl.broadcast(state, part)
    HELD: tl.constexpr = state.shape[2] * state.shape[3]
    state = tl.reshape(state, (state.shape[0], state.shape[1], HELD, state.shape[4]))
    part = tl.reshape(part, (part.shape[0], part.shape[1], HELD, part.shape[4]))
    factor, total = tl.reduce((state, part), 2, _add_product)
    return tl.sum(factor * total, axis=0)


@triton.jit
def _delta(state, k, v, decay, beta):
    return beta * tl.fma(-decay, _along(state, k), v)


@triton.jit
def _updated(state, k, decay, delta):
    return tl.fma(k, delta[None, :, None, None, :], decay * state)


@triton.jit
def _advance_tile(
    tile,
    run,
    prepared,  # [T + B * P, WIDTH]
    field,  # [FIELDS] of the run
    states,  # [S, HV, DK, DV]
    out,  # [T, HV * DV]
    max_pending,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequential scan of a run's rows over some columns of one head's state."""
    TILES: tl.constexpr = (DV + WARPS * V - 1) // (WARPS * V)
    WIDTH: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV + HK
    head = tile // TILES
    key_head = head // (HV // HK)
    key = _keys(BK, LANES)
    # Every warp has separate columns, so that no sum crosses warps.
    warp = (tile % TILES) * WARPS + tl.arange(0, WARPS)
    value = warp[:, None] * V + tl.arange(0, V)[None, :]
    is_key, is_value = key < DK, value < DV
    inside = is_key[:, :, :, :, None] & is_value[None, :, None, None, :]

    # All loads together: dependent loads would cost as much as the row itself.
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows, stop_row = fact(field, NUM_ROWS).to(tl.int32), fact(field, STOP_ROW)
    num_folded, num_lasting = fact(field, NUM_FOLDED).to(tl.int32), fact(field, NUM_LASTING)
    empty, broken = fact(field, EMPTY) != 0, fact(field, BROKEN) != 0
    # Offsets from one base address, so that a thread keeps no address per element.
    at_once = key[:, :, :, :, None] * DV + value[None, :, None, None, :]
    state_at = states + (slot * HV + head) * DK * DV + at_once
    exists = inside & (empty == 0) & (num_rows > 0)
    state = tl.load(state_at, exists, other=0.0, cache_modifier=".cg")
    # No other kernel writes the layer's states between ``plan_runs``, a PDL barrier, and here.
    gdc_wait(PDL)

    prepared += (first_row + run * max_pending) * WIDTH
    q_at = prepared + key_head * DK + key
    k_at = q_at + HK * DK
    v_at = prepared + 2 * HK * DK + head * DV + value
    decay_at = prepared + 2 * HK * DK + HV * DV + head
    q_k_at = prepared + WIDTH - HK + key_head
    out += first_row * HV * DV + head * DV + value
    # One loop without branches, so that folded and new rows run the same instructions; the output
    # of folded rows is not stored.
    for t in tl.range(num_folded + num_rows, num_stages=STAGES):
        at, is_new = t * WIDTH, t >= num_folded
        k = tl.load(k_at + at, is_key, other=0.0)[:, :, :, :, None]
        q = tl.load(q_at + at, is_key, other=0.0)[:, :, :, :, None]
        v = tl.load(v_at + at, is_value, other=0.0)
        decay, beta = tl.load(decay_at + at), tl.load(decay_at + at + HV)
        q_k = tl.load(q_k_at + at)
        delta = _delta(state, k, v, decay, beta)
        read = tl.fma(delta, q_k, decay * _along(state, q)).to(out.dtype.element_ty)
        tl.store(out + (t - num_folded) * HV * DV, read, is_value & is_new)
        state = _updated(state, k, decay, delta)
        if t + 1 == num_lasting:
            tl.store(state_at, state, inside)

    _fill_dead(out, num_rows, (stop_row - first_row).to(tl.int32), broken, is_value, HV * DV)


@triton.jit
def _fill_dead(out, num_rows, stop, broken, is_value, ROW: tl.constexpr):
    """Fill dead rows with zeros; all rows of a broken run with NaN."""
    fill = tl.zeros(is_value.shape, tl.float32) + tl.where(broken, float("nan"), 0.0)
    for row in range(num_rows, stop):
        tl.store(out + row * ROW, fill.to(out.dtype.element_ty), is_value)


@triton.jit(do_not_specialize=["max_pending"])
def _advance_kernel(
    prepared,  # [T + B * P, WIDTH]
    qkv,  # [T, C], rows qkv_stride apart
    a,  # [T, HV], rows a_stride apart
    b,  # [T, HV], rows b_stride apart
    runs,  # [B, FIELDS]
    states,  # [S, HV, DK, DV], written
    history,  # [S, K - 1, C], written
    pending_qkv,  # [S, P, C], written
    pending_gates,  # [S, P, 2 * HV], written
    out,  # [T, HV * DV], written
    qkv_stride,
    a_stride,
    b_stride,
    max_pending,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    PROGRAMS: tl.constexpr = HV * ((DV + WARPS * V - 1) // (WARPS * V))
    program = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    field = runs + run * FIELDS
    if program < PROGRAMS:
        _advance_tile(
            program, run, prepared, field, states, out, max_pending,
            HK, HV, DK, DV, BK, WARPS, V, LANES, STAGES, PDL,
        )  # fmt: skip
    else:
        keep_raw(
            program - PROGRAMS, tl.num_programs(0) - PROGRAMS, qkv, a, b, field,
            history, pending_qkv, pending_gates, qkv_stride, a_stride, b_stride, max_pending,
            C, HV, K, KEPT_BLOCK, HEADS, TAPS_BLOCK, PDL,
        )  # fmt: skip


def advance(
    runs: Runs,
    params: GatedDeltaParams,
    raw: RawRows,
    memory: LayerMemory,
    tile: RuleTile | None = None,
) -> Tensor:
    """Convolution and gated delta rule of a pass's rows in one layer: [T, Hv * Dv].

    Sums run in fp32 and round once, to the dtype of the raw rows. Dead rows of a run are zero;
    rows after the last run are not written.

    Args:
        runs: of the pass.
        params: the layer's weights.
        raw: the rows, in the dtype of ``memory``.
        memory: the slots' memory in the layer; written.
        tile: of states; the same in all passes.
    """
    if not runs.rows.count:
        return raw.mixed.new_empty(raw.mixed.shape[0], params.rule.out_features)
    prepared = prepare(runs, params, raw, memory)
    return advance_prepared(runs, params.rule, prepared, raw, memory, tile or RuleTile())


def advance_prepared(
    runs: Runs,
    rule: GatedDelta,
    prepared: Tensor,
    raw: RawRows,
    memory: LayerMemory,
    tile: RuleTile,
) -> Tensor:
    """``advance`` after ``prepare``, with its output; other arguments as in ``advance``."""
    tile = tile.fitted(rule.value_dim)
    num_rows, num_channels = raw.mixed.shape
    assert raw.mixed.dtype == memory.history.dtype
    out = raw.mixed.new_empty(num_rows, rule.out_features)
    keys, batch = triton.next_power_of_2(rule.key_dim), runs.table.shape[0]
    tiles = triton.cdiv(rule.value_dim, tile.value_columns * tile.num_warps)
    programs, block = rule.num_value_heads * tiles, KEPT_CHANNELS * tile.num_warps
    blocks = triton.cdiv(num_channels, block)
    long = runs.rows.max_rows >= _LONG
    keepers = num_keepers(programs, batch, tile.num_warps, blocks, long)
    _advance_kernel[(programs + keepers, batch)](
        prepared,
        raw.mixed,
        *raw.gates,
        runs.table,
        memory.states,
        memory.history,
        memory.pending_mixed,
        memory.pending_gates,
        out,
        *raw.strides,
        memory.max_pending,
        **rule.constants,
        BK=keys,
        WARPS=tile.num_warps,
        V=tile.value_columns,
        LANES=min(keys, max(1, _FLOATS_PER_WARP // tile.value_columns)),
        HEADS=triton.next_power_of_2(rule.num_value_heads),
        KEPT_BLOCK=block,
        TAPS_BLOCK=triton.next_power_of_2(max(rule.conv_kernel - 1, 1)),
        STAGES=_STAGES,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
        **pdl_options(out, early=not long),
    )
    return out

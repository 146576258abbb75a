"""Gated DeltaNet without its projections, in Triton: one row function, folded by position.

A pass has three kinds of launch. ``plan_runs`` derives from positions the rows that each slot
folds, commits and leaves pending. Per layer, ``prepare`` turns raw rows, pending ones included,
into the inputs of the rule, and ``advance`` scans them sequentially with the state in registers:
first folded rows, then new ones, which also produce output. One loop runs all rows, so decode,
verify, fold and prefill run the same instructions and give a row the same bits. On Hopper,
``hopper`` walks long runs, with the same operations in the same order. Prompts in the fast form run
by ``chunks``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.gated_delta_rule import hopper
from sametoken.ops.model.gated_delta_rule.chunks import advance_chunks
from sametoken.ops.model.gated_delta_rule.prepare import prepare
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.recurrent.keep import KEPT_CHANNELS, keep_raw, num_keepers
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import FIELDS, Runs, facts, fill_dead
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options
from sametoken.ops.triton_versions import LAST_AXIS_FIRST

# Parts of a column of the state that are summed apart, and the most elements that a thread loads.
_PARTS, _TOGETHER = tl.constexpr(8), tl.constexpr(4)
_LAST_FIRST = tl.constexpr(LAST_AXIS_FIRST)
# Threads of a warp.
_THREADS = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class RuleTile:
    """The tile of a head's state that a program holds. It does not affect bits.

    Attributes:
        value_columns: columns of the state per warp, at most 32.
        num_warps: per program; every warp has separate columns.
        stages: depth of the load pipeline of prepared rows.
    """

    value_columns: int
    num_warps: int
    stages: int

    def fitted(self, value_dim: int) -> RuleTile:
        """This tile, limited to the columns of a state."""
        most = triton.next_power_of_2(value_dim)
        columns = min(self.value_columns, most)
        return replace(self, value_columns=columns, num_warps=min(self.num_warps, most // columns))


# The fewest instructions per element, which suits states that fill the GPU.
_TILE = RuleTile(32, 2, 4)


@triton.jit
def _keys(DK: tl.constexpr, V: tl.constexpr):
    """[1, LANES, 1, PARTS, RUNS, TOGETHER]: keys in runs of four, which a thread loads together.

    LANES threads share a column of the state, and each has PARTS parts of it.
    """
    BK: tl.constexpr = triton.next_power_of_2(DK)
    LANES: tl.constexpr = min(BK, _PARTS, _TOGETHER * _THREADS // V)
    PARTS: tl.constexpr = min(BK, _PARTS) // LANES
    TOGETHER: tl.constexpr = min(_TOGETHER, BK // (LANES * PARTS))
    RUNS: tl.constexpr = BK // (LANES * PARTS * TOGETHER)
    lane = tl.arange(0, LANES)[None, :, None, None, None, None]
    part = tl.arange(0, PARTS)[None, None, None, :, None, None]
    run = tl.arange(0, RUNS)[None, None, None, None, :, None]
    place = tl.arange(0, TOGETHER)[None, None, None, None, None, :]
    return ((run * PARTS + part) * LANES + lane) * TOGETHER + place


@triton.jit
def _columns(first_warp, V: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr):
    """[V, LANES, WARPS]: every warp has separate columns, so that no sum crosses warps."""
    warp = first_warp + tl.arange(0, WARPS)[None, None, :]
    column = warp * V + tl.arange(0, V)[:, None, None]
    # The hint spreads a warp's columns over its threads, whatever their number.
    column = tl.max_contiguous(column, [max(1, V * LANES // _THREADS), 1, 1])
    return tl.broadcast_to(column, (V, LANES, WARPS))


@triton.jit
def _dealt(state):
    """Axes in the order that gives columns and lanes to threads and WARPS to warps, and back."""
    if _LAST_FIRST:
        state = tl.permute(state, (0, 5, 4, 3, 2, 1))
    return state


@triton.jit
def _add_product(factor, total, a, b):
    """Add a product to the running sum factor * total with one rounding."""
    # Not the number 1.0, which is no tensor to Triton 3.8.
    return tl.zeros_like(total) + 1.0, tl.fma(a, b, factor * total)


@triton.jit
def _along(state, factors):
    """Sum over keys of state [V, LANES, WARPS, PARTS, RUNS, TOGETHER] times factors [1, ..].

    Returns [V, LANES, WARPS], the same for all lanes. Every rounding is explicit and not left to
    the compiler: a thread sums each part in order and adds its parts, then lanes add theirs.
    """
    state, factors = tl.broadcast(state, factors)
    V: tl.constexpr = state.shape[0]
    LANES: tl.constexpr = state.shape[1]
    WARPS: tl.constexpr = state.shape[2]
    PARTS: tl.constexpr = state.shape[3]
    HELD: tl.constexpr = state.shape[4] * state.shape[5]
    state = tl.reshape(state, (V, LANES, WARPS, PARTS, HELD))
    factors = tl.reshape(factors, (V, LANES, WARPS, PARTS, HELD))
    factor, sums = tl.reduce((state, factors), 4, _add_product)
    total = tl.sum(tl.sum(factor * sums, axis=3), axis=1, keep_dims=True)
    return tl.broadcast_to(total, (V, LANES, WARPS))


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
    WARPS: tl.constexpr,
    V: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequential scan of a run's rows over some columns of one head's state."""
    TILES: tl.constexpr = triton.cdiv(DV, WARPS * V)
    WIDTH: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV + HK
    head = tile // TILES
    key_head = head // (HV // HK)
    key = _keys(DK, V)
    LANES: tl.constexpr = key.shape[1]
    value = _columns((tile % TILES) * WARPS, V, LANES, WARPS)
    is_key, is_value = key < DK, value < DV
    inside = is_key & is_value[:, :, :, None, None, None]

    slot, first_row, num_rows, stop_row, num_folded, num_lasting, empty, broken = facts(field)
    # Offsets from one base address, so that a thread keeps no address per element.
    at_once = key * DV + value[:, :, :, None, None, None]
    state_at = _dealt(states + (slot * HV + head) * DK * DV + at_once)
    exists = _dealt(inside & (empty == 0) & (num_rows > 0))
    state = _dealt(tl.load(state_at, exists, other=0.0, cache_modifier=".cg"))
    # No other kernel writes the layer's states between ``plan_runs``, a PDL barrier, and here.
    gdc_wait(PDL)

    prepared += (first_row + run * max_pending) * WIDTH
    q_at = prepared + key_head * DK + key
    k_at = q_at + HK * DK
    v_at = prepared + 2 * HK * DK + head * DV + value
    decay_at = prepared + 2 * HK * DK + HV * DV + head
    q_k_at = prepared + WIDTH - HK + key_head
    out += first_row * HV * DV + head * DV + value
    is_stored = is_value & (tl.arange(0, LANES)[None, :, None] == 0)
    # One loop without branches, so that folded and new rows run the same instructions; the output
    # of folded rows is not stored.
    for t in tl.range(num_folded + num_rows, num_stages=STAGES):
        at, is_new = t * WIDTH, t >= num_folded
        k = tl.load(k_at + at, is_key, other=0.0)
        q = tl.load(q_at + at, is_key, other=0.0)
        v = tl.load(v_at + at, is_value, other=0.0)
        decay, beta = tl.load(decay_at + at), tl.load(decay_at + at + HV)
        q_k = tl.load(q_k_at + at)
        delta = beta * tl.fma(-decay, _along(state, k), v)
        read = tl.fma(delta, q_k, decay * _along(state, q)).to(out.dtype.element_ty)
        tl.store(out + (t - num_folded) * HV * DV, read, is_stored & is_new)
        state = tl.fma(k, delta[:, :, :, None, None, None], decay * state)
        if t + 1 == num_lasting:
            tl.store(state_at, _dealt(state), _dealt(inside))

    fill_dead(out, num_rows, (stop_row - first_row).to(tl.int32), broken, is_stored, HV * DV)


@triton.jit(do_not_specialize=["max_pending", "num_short", "num_walked"])
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
    num_short,  # runs
    num_walked,  # leading runs whose rows are walked here
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    V: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    PROGRAMS: tl.constexpr = HV * triton.cdiv(DV, WARPS * V)
    program = tl.program_id(0)
    # Long runs, which come last, start first.
    run = ((tl.program_id(1) + num_short) % tl.num_programs(1)).to(tl.int64)
    field = runs + run * FIELDS
    if program >= PROGRAMS:
        keep_raw(
            program - PROGRAMS, tl.num_programs(0) - PROGRAMS, qkv, a, b, field,
            history, pending_qkv, pending_gates, qkv_stride, a_stride, b_stride, max_pending,
            C, HV, K, KEPT_BLOCK, PDL,
        )  # fmt: skip
    elif run < num_walked:
        _advance_tile(
            program, run, prepared, field, states, out, max_pending,
            HK, HV, DK, DV, WARPS, V, STAGES, PDL,
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
        tile: of states, for this walk to serve all runs; by default what suits the pass.
    """
    if not runs.rows.count:
        return raw.mixed.new_empty(raw.mixed.shape[0], params.rule.out_features)
    # Nobody holds prepared rows while there are chunks.
    out = advance_prepared(runs, params.rule, prepare(runs, params, raw, memory), raw, memory, tile)
    if runs.fast:
        advance_chunks(runs.fast, params, raw, memory, out)
    return out


def advance_prepared(
    runs: Runs,
    rule: GatedDelta,
    prepared: Tensor,
    raw: RawRows,
    memory: LayerMemory,
    tile: RuleTile | None,
) -> Tensor:
    """``advance`` after ``prepare``, with its output; other arguments as in ``advance``."""
    num_rows = raw.mixed.shape[0]
    on_hopper = tile is None and hopper.serves(runs, rule, prepared, num_rows)
    tile = (tile or _TILE).fitted(rule.value_dim)
    assert raw.mixed.dtype == memory.history.dtype
    out = raw.mixed.new_empty(num_rows, rule.out_features)
    batch = runs.table.shape[0]
    tiles = triton.cdiv(rule.value_dim, tile.value_columns * tile.num_warps)
    programs, long = rule.num_value_heads * tiles, runs.are_long
    keepers = num_keepers(programs, batch, tile.num_warps, rule.conv_channels, long=long)
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
        runs.rows.num_short,
        runs.rows.num_short if on_hopper else batch,
        **rule.constants,
        WARPS=tile.num_warps,
        V=tile.value_columns,
        KEPT_BLOCK=KEPT_CHANNELS * tile.num_warps,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        **pdl_options(out, early=not long),
    )
    if on_hopper:
        hopper.walk(runs, rule, prepared, memory, out)
    return out

"""Gated DeltaNet between its projections in Triton: one row function, folded by position.

A pass makes three kinds of launch. ``plan_runs`` derives from positions what each slot
folds, runs for good and leaves pending. Per layer ``prepare`` turns raw rows, pending ones
included, into what the rule reads, and ``advance`` walks them in order with the state in
registers. Row counts, windows and batches are no part of any compiled form, so decode,
verify, fold and prefill run the same instructions and a row has the same bits in each.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.gated_delta_rule.operands import LayerMemory, RawRows, sizes
from sametoken.kernels.gated_delta_rule.prepare import prepare
from sametoken.kernels.gated_delta_rule.runs import (
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
    plan_runs,
    raw_row,
)
from sametoken.kernels.overlap import overlapped, wait_for_earlier

__all__ = ["LayerMemory", "RawRows", "RuleTile", "Runs", "advance", "plan_runs"]

_COPY_BLOCK = 512


@dataclass(frozen=True, slots=True)
class RuleTile:
    """How a state is cut among programs. Sums follow it: an engine keeps to one.

    Attributes:
        value_columns: columns of a head's state that one program holds.
        num_warps: of every program.
        max_registers: per thread; fewer let more programs run beside each other. None: as
            many as the compiler takes.
    """

    value_columns: int = 16
    num_warps: int = 1
    max_registers: int | None = 168


@triton.jit
def _load_row(
    at, exists, head, key, value, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """One prepared row for a tile of a head: q, k [BK], v [BV], decay, beta; zeros if none."""
    key_head = head // (HV // HK)
    q = at + key_head * DK + key
    v = at + 2 * HK * DK + head * DV + value
    gate = at + 2 * HK * DK + HV * DV + head
    is_key = exists & (key < DK)
    return (
        tl.load(q, is_key, other=0.0),
        tl.load(q + HK * DK, is_key, other=0.0),
        tl.load(v, exists & (value < DV), other=0.0),
        tl.load(gate, exists, other=0.0),
        tl.load(gate + HV, exists, other=0.0),
    )


@triton.jit
def _advance_tile(
    tile,
    prepared,  # [rows, WIDTH] of the run
    field,  # [FIELDS] of the run
    states,  # [S, HV, DK, DV]
    out,  # [T, HV * DV]
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Run a run's rows over some columns of one head's state."""
    TILES: tl.constexpr = (DV + BV - 1) // BV
    WIDTH: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV
    head = tile // TILES
    key = tl.arange(0, BK)
    value = (tile % TILES) * BV + tl.arange(0, BV)
    inside = (key < DK)[:, None] & (value < DV)[None, :]

    # All at once: a load that waits for another one costs as much as the row itself.
    slot, first_row = tl.load(field + SLOT), tl.load(field + FIRST_ROW)
    num_rows = tl.load(field + NUM_ROWS).to(tl.int32)
    num_folded = tl.load(field + NUM_FOLDED).to(tl.int32)
    num_lasting = tl.load(field + NUM_LASTING).to(tl.int32)
    empty, stop_row = tl.load(field + EMPTY) != 0, tl.load(field + STOP_ROW)
    broken = tl.load(field + BROKEN) != 0
    out += first_row * HV * DV + head * DV
    if num_rows > 0:
        slot_head = slot * HV + head
        state_at = states + (slot_head * DK + key[:, None]) * DV + value[None, :]
        q, k, v, decay, beta = _load_row(prepared, True, head, key, value, HK, HV, DK, DV)
        state = tl.load(state_at, inside & (empty == 0), other=0.0)
        total = num_folded + num_rows
        for t in range(total):
            # The next row is on its way while this one is run.
            prepared += WIDTH
            next_q, next_k, next_v, next_decay, next_beta = _load_row(
                prepared, t + 1 < total, head, key, value, HK, HV, DK, DV
            )
            # Both sums read the state of before, so that neither waits for the other.
            along_k = tl.sum(state * k[:, None], axis=0)
            along_q = tl.sum(state * q[:, None], axis=0)
            delta = beta * (v - decay * along_k)
            read = decay * along_q + delta * tl.sum(q * k, axis=0)
            state = decay * state + k[:, None] * delta[None, :]
            at = out + (t - num_folded) * HV * DV + value
            tl.store(at, read.to(out.dtype.element_ty), (t >= num_folded) & (value < DV))
            if t + 1 == num_lasting:
                tl.store(state_at, state, inside)
            q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta

    # Dead rows are zero; those of a slot whose rows do not follow are nobody's.
    fill = tl.zeros((BV,), tl.float32) + tl.where(broken, float("nan"), 0.0)
    for row in range(num_rows, (stop_row - first_row).to(tl.int32)):
        at = out + row * HV * DV + value
        tl.store(at, fill.to(out.dtype.element_ty), value < DV)


@triton.jit
def _keep_raw(
    block,
    qkv,  # [T, C], rows qkv_stride apart
    a,  # [T, HV], rows a_stride apart
    b,  # [T, HV], rows b_stride apart
    field,  # [FIELDS] of the run
    history,  # [S, K - 1, C], written
    pending_qkv,  # [S, P, C], written
    pending_gates,  # [S, P, 2 * HV], written
    qkv_stride,
    a_stride,
    b_stride,
    max_pending,
    C: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BH: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
):
    """Keep the raw rows before the next first row and after it, for some channels."""
    TAPS: tl.constexpr = K - 1
    num_rows = tl.load(field + NUM_ROWS)
    if num_rows > 0:
        slot, first_row = tl.load(field + SLOT), tl.load(field + FIRST_ROW)
        num_folded, num_lasting = tl.load(field + NUM_FOLDED), tl.load(field + NUM_LASTING)
        empty = tl.load(field + EMPTY) != 0
        history += slot * TAPS * C
        pending_qkv += slot * max_pending * C
        pending_gates += slot * max_pending * 2 * HV
        column = block * BLOCK + tl.arange(0, BLOCK)
        tap = tl.arange(0, TAPS_BLOCK)
        index = num_lasting + tap
        raw = raw_row(index, qkv, history, pending_qkv, first_row, num_folded, qkv_stride, C, TAPS)
        kept = (tap < TAPS)[:, None] & (column < C)[None, :]
        exists = ((index >= TAPS) | (empty == 0))[:, None]
        values = tl.load(raw[:, None] + column[None, :], kept & exists, other=0.0)
        # Another thread may still have to read what this one writes.
        tl.debug_barrier()
        tl.store(history + tap[:, None] * C + column[None, :], values, kept)

        # New rows from ``first_new`` on become pending, behind what stays there.
        has_lasting = num_lasting > 0
        first_new = tl.where(has_lasting, num_lasting - num_folded, 0)
        stays = tl.where(has_lasting, 0, num_folded)
        for i in range((num_rows - first_new).to(tl.int32)):
            row, place = first_row + first_new + i, stays + i
            new = tl.load(qkv + row * qkv_stride + column, column < C)
            tl.store(pending_qkv + place * C + column, new, column < C)
            if block == 0:
                head = tl.arange(0, BH)
                gate = pending_gates + place * 2 * HV + head
                tl.store(gate, tl.load(a + row * a_stride + head, head < HV), head < HV)
                tl.store(gate + HV, tl.load(b + row * b_stride + head, head < HV), head < HV)


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
    BV: tl.constexpr,
    BH: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    PROGRAMS: tl.constexpr = HV * ((DV + BV - 1) // BV)
    program = tl.program_id(0)
    run = tl.program_id(1).to(tl.int64)
    field = runs + run * FIELDS
    if program < PROGRAMS:
        first = tl.load(field + FIRST_ROW) + run * max_pending
        _advance_tile(
            program, prepared + first * (C + 2 * HV), field, states, out,
            HK, HV, DK, DV, BK, BV,
        )  # fmt: skip
    else:
        _keep_raw(
            program - PROGRAMS, qkv, a, b, field, history, pending_qkv, pending_gates,
            qkv_stride, a_stride, b_stride, max_pending, C, HV, K, COPY_BLOCK, BH, TAPS_BLOCK,
        )  # fmt: skip


def advance(
    runs: Runs,
    spec: Any,
    params: Any,
    raw: RawRows,
    memory: LayerMemory,
    tile: RuleTile | None = None,
) -> Tensor:
    """Convolution and gated delta rule of a pass's rows in one layer: [T, Hv * Dv].

    Sums run in fp32 and round once, to the dtype of the raw rows. Dead rows are zero.

    Args:
        runs: of the pass.
        spec: the sizes (``state.recurrent.RecurrentSpec``).
        params: the layer's weights (``state.recurrent.GatedDeltaParams``).
        raw: the rows, in the dtype in which raw rows are kept.
        memory: what the slots keep in the layer; written.
        tile: how states are cut; the same in all passes.
    """
    tile = tile or RuleTile()
    num_rows, num_channels = raw.qkv.shape
    assert raw.qkv.dtype == memory.history.dtype
    out = raw.qkv.new_empty(num_rows, spec.num_value_heads * spec.value_dim)
    if not num_rows:
        return out
    prepared = prepare(runs, spec, params, raw, memory)
    columns = min(tile.value_columns, triton.next_power_of_2(spec.value_dim))
    programs = spec.num_value_heads * triton.cdiv(spec.value_dim, columns)
    copies = triton.cdiv(num_channels, _COPY_BLOCK)
    _advance_kernel[(programs + copies, runs.table.shape[0])](
        prepared,
        raw.qkv,
        raw.a,
        raw.b,
        runs.table,
        memory.states,
        memory.history,
        memory.pending_qkv,
        memory.pending_gates,
        out,
        *raw.strides,
        memory.max_pending,
        **sizes(spec),
        BK=triton.next_power_of_2(spec.key_dim),
        BV=columns,
        BH=triton.next_power_of_2(spec.num_value_heads),
        COPY_BLOCK=_COPY_BLOCK,
        TAPS_BLOCK=triton.next_power_of_2(max(spec.conv_kernel - 1, 1)),
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
        **overlapped(out),
    )
    return out

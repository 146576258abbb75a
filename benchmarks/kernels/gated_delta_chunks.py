"""Prototype kernels of ``gated_delta_parallel_gpu.py``: the gated delta rule in chunks.

``link`` prepares a chunk's triangular matrices, ``advance_chunks`` scans chunks, ``walk_chunks``
runs the rows of all chunks at once from the states at their borders.
"""

# ruff: noqa: PLR0913, PLR0915
# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.gated_delta_rule.triton import (
    RuleTile,
    _along,
    _delta,
    _keys,
    _updated,
)
from sametoken.ops.model.recurrent.keep import KEPT_CHANNELS, keep_raw, num_keepers
from sametoken.ops.model.recurrent.runs import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    NUM_FOLDED,
    NUM_LASTING,
    NUM_ROWS,
    SLOT,
    Runs,
    fact,
)
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options


@dataclass(frozen=True)
class ChunkTile:
    """Rows of a chunk, and how a program holds a state.

    Attributes:
        parts: bf16 parts of an fp32 factor: 2 (three products) or 1 (one product).
        links: precision of the products of the inverse by blocks.
        by_products: invert by blocks (products) in place of row after row.
        max_registers: per thread; None: the compiler's choice.
    """

    rows: int = 16
    columns: int = 32
    warps: int = 2
    stages: int = 2
    parts: int = 2
    links: str = "tf32x3"
    by_products: bool = False
    max_registers: int | None = None

    @property
    def name(self) -> str:
        inverse = "blocks" if self.by_products else "rows"
        return (
            f"C={self.rows} V={self.columns} warps={self.warps} stages={self.stages} "
            f"parts={self.parts} {self.links} {inverse} {self.max_registers or '-'}"
        )


@triton.jit
def _split(x, PARTS: tl.constexpr):
    """bf16 parts of fp32 values, the larger first; NaN stays in the smaller."""
    if PARTS == 1:
        high = x.to(tl.bfloat16)
        return high, high
    bits = x.to(tl.int32, bitcast=True) + 0x8000
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, (x - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def _product(x, y, total, PARTS: tl.constexpr):
    """Add the product of two pairs of parts to ``total``, small terms first."""
    if PARTS == 2:
        total = tl.dot(x[1], y[0], total)
        total = tl.dot(x[0], y[1], total)
    return tl.dot(x[0], y[0], total)


@triton.jit
def _store_split(at, x, OFFSET: tl.constexpr):
    high, low = _split(x, 2)
    tl.store(at, high)
    tl.store(at + OFFSET, low)


@triton.jit
def _chunk_place(first_row, run, max_pending, C: tl.constexpr):
    """First prepared row of a run, and the place of its first chunk among all runs' chunks."""
    base = first_row + run * max_pending
    return base, base // C + run


@triton.jit(do_not_specialize=["max_pending"])
def _links_kernel(
    prepared,  # [rows, WIDTH]
    runs,  # [B, FIELDS]
    keys,  # [rows, HK, 4 * DK] bf16, written: k, its low part, q, its low part
    links,  # [chunks, HV, 4 * C * C] bf16, written: (T beta)^T, its low part, P^T, its low part
    decays,  # [chunks, HV, 2 * C], written
    max_pending,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_PRODUCTS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    WIDTH: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV + HK
    head, chunk, run = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    field = runs + run * FIELDS
    num_rows = fact(field, NUM_ROWS).to(tl.int32)
    total = tl.where(num_rows > 0, fact(field, NUM_FOLDED).to(tl.int32) + num_rows, 0)
    gdc_wait(PDL)
    if chunk * C < total:
        base, place = _chunk_place(fact(field, FIRST_ROW), run, max_pending, C)
        prepared += (base + chunk * C) * WIDTH
        row, other = tl.arange(0, C), tl.arange(0, C)
        valid = chunk * C + row < total
        gate = prepared + row * WIDTH + 2 * HK * DK + HV * DV + head
        decay, beta = tl.load(gate, valid, other=1.0), tl.load(gate + HV, valid, other=0.0)
        since = tl.cumsum(tl.log(tl.maximum(decay, 1e-37)), axis=0)
        ratio = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0))
        alike = tl.zeros((C, C), tl.float32)
        read = alike
        q_at = prepared + row[:, None] * WIDTH + head // (HV // HK) * DK
        part_at = keys + (base + chunk * C + row[:, None]) * (4 * HK * DK)
        part_at += head // (HV // HK) * 4 * DK
        for first in range(0, BK, SLICE):
            key = first + tl.arange(0, SLICE)[None, :]
            inside = valid[:, None] & (key < DK)
            k = tl.load(q_at + HK * DK + key, inside, other=0.0)
            q = tl.load(q_at + key, inside, other=0.0)
            k_high, k_low = _split(k, 2)
            q_high, q_low = _split(q, 2)
            if head % (HV // HK) == 0:
                tl.store(part_at + key, k_high, inside)
                tl.store(part_at + DK + key, k_low, inside)
                tl.store(part_at + 2 * DK + key, q_high, inside)
                tl.store(part_at + 3 * DK + key, q_low, inside)
            across = (tl.trans(k_high), tl.trans(k_low))
            alike = _product((k_high, k_low), across, alike, 2)
            read = _product((q_high, q_low), across, read, 2)
        below = row[:, None] > other[None, :]
        a = tl.where(below, alike * ratio * beta[:, None], 0.0)
        p = tl.where(row[:, None] >= other[None, :], read * ratio, 0.0)
        t = tl.where(row[:, None] == other[None, :], 1.0, 0.0)
        if BY_PRODUCTS:
            t = _inverse_by_blocks(t, a, row, other, C, PRECISION)
        else:
            for i in range(1, tl.minimum(total - chunk * C, C)):
                own = tl.sum(tl.where((row == i)[:, None], a, 0.0), axis=0)
                found = tl.sum(tl.expand_dims(own, 1) * t, axis=0)
                t = tl.where((row == i)[:, None], t - found[None, :], t)
        scaled = t * tl.expand_dims(beta, 0)
        links += ((place + chunk) * HV + head) * 4 * C * C
        pair = other[None, :] * C + row[:, None]
        _store_split(links + pair, scaled, C * C)
        _store_split(links + 2 * C * C + pair, p, C * C)
        decays += ((place + chunk) * HV + head) * 2 * C
        last = tl.sum(tl.where(row == C - 1, since, 0.0), axis=0)
        tl.store(decays + row, tl.exp(since))
        tl.store(decays + C + row, tl.exp(last - since))


@triton.jit
def _joined(t, a, row, other, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of blocks of 2 * SIZE rows from those of SIZE rows."""
    pair = (row[:, None] // (2 * SIZE)) == (other[None, :] // (2 * SIZE))
    joins = pair & ((row[:, None] // SIZE) != (other[None, :] // SIZE))
    part = tl.dot(tl.where(joins, a, 0.0), t, input_precision=PRECISION)
    return t - tl.dot(t, part, input_precision=PRECISION)


@triton.jit
def _inverse_by_blocks(t, a, row, other, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for strictly lower a; t is I."""
    t -= tl.where((row[:, None] // 2) == (other[None, :] // 2), a, 0.0)
    t = _joined(t, a, row, other, 2, PRECISION)
    t = _joined(t, a, row, other, 4, PRECISION)
    t = _joined(t, a, row, other, 8, PRECISION)
    if C >= 32:
        t = _joined(t, a, row, other, 16, PRECISION)
    if C >= 64:
        t = _joined(t, a, row, other, 32, PRECISION)
    return t


@triton.jit
def _scan_chunks(
    tile,
    run,
    prepared,  # [rows, WIDTH]
    keys,  # [rows, HK, 4 * DK]
    links,  # [chunks, HV, 4 * C * C]
    decays,  # [chunks, HV, 2 * C]
    field,
    states,  # [S, HV, DV, DK]
    borders,  # [chunks, HV, DK, DV] or None, written
    out,
    max_pending,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    READ: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scan a run's chunks over some columns of one head's state."""
    TILES: tl.constexpr = (DV + V - 1) // V
    WIDTH: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV + HK
    head = tile // TILES
    row, key = tl.arange(0, C), tl.arange(0, BK)
    value = (tile % TILES) * V + tl.arange(0, V)
    is_key, is_value = key < DK, value < DV
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows, num_folded = fact(field, NUM_ROWS).to(tl.int32), fact(field, NUM_FOLDED).to(tl.int32)
    num_lasting, empty = fact(field, NUM_LASTING).to(tl.int32), fact(field, EMPTY) != 0
    inside = is_value[:, None] & is_key[None, :]
    at_once = head * DV * DK + value[:, None] * DK + key[None, :]
    state_at = states + slot * HV * DV * DK + at_once
    exists = inside & (empty == 0) & (num_rows > 0)
    state = tl.load(state_at, exists, other=0.0, cache_modifier=".cg")
    gdc_wait(PDL)
    base, place = _chunk_place(first_row, run, max_pending, C)
    keys += base * 4 * HK * DK + head // (HV // HK) * 4 * DK
    v_at = prepared + base * WIDTH + 2 * HK * DK + head * DV
    links += (place * HV + head) * 4 * C * C
    decays += (place * HV + head) * 2 * C
    out += (first_row - num_folded) * HV * DV + head * DV
    total = tl.where(num_rows > 0, num_folded + num_rows, 0)
    pair = row[:, None] * C + row[None, :]
    none = tl.zeros((V, C), tl.float32)
    for chunk in tl.range((total + C - 1) // C, num_stages=STAGES):
        if borders is not None:
            border = borders + ((place + chunk) * HV + head) * DK * DV
            tl.store(border + key[None, :] * DV + value[:, None], state, inside)
        t = chunk * C + row
        valid = t < total
        k_at = keys + t[:, None] * (4 * HK * DK) + key[None, :]
        k_mask = valid[:, None] & is_key[None, :]
        link, decay_at = links + chunk * HV * 4 * C * C, decays + chunk * HV * 2 * C
        k_high = tl.load(k_at, k_mask, other=0.0)
        k_low = tl.load(k_at + DK, k_mask, other=0.0)
        v_mask = valid[:, None] & is_value[None, :]
        v = tl.load(v_at + t[:, None] * WIDTH + value[None, :], v_mask, other=0.0)
        inverse = (tl.load(link + pair), tl.load(link + C * C + pair))
        since, until = tl.load(decay_at + row), tl.load(decay_at + C + row)
        decay = tl.load(decay_at + C - 1)
        held_state = _split(state, PARTS)
        across = (tl.trans(k_high), tl.trans(k_low))
        held = _product(held_state, across, none, PARTS) * since[None, :]
        if READ:
            q_high = tl.load(k_at + 2 * DK, k_mask, other=0.0)
            q_low = tl.load(k_at + 3 * DK, k_mask, other=0.0)
            asked = (tl.trans(q_high), tl.trans(q_low))
            reads = (tl.load(link + 2 * C * C + pair), tl.load(link + 3 * C * C + pair))
            found = _product(held_state, asked, none, PARTS) * since[None, :]
        deltas = _product(_split(tl.trans(v) - held, PARTS), inverse, none, PARTS)
        if READ:
            found = _product(_split(deltas, PARTS), reads, found, PARTS)
            new = v_mask & (t >= num_folded)[:, None]
            out_at = out + t[:, None] * (HV * DV) + value[None, :]
            tl.store(out_at, tl.trans(found).to(out.dtype.element_ty), new)
        faded = _split(deltas * until[None, :], PARTS)
        state = _product(faded, (k_high, k_low), state * decay, PARTS)
        if chunk * C + C == num_lasting:
            tl.store(state_at, state, inside)


@triton.jit(do_not_specialize=["max_pending"])
def _advance_chunks_kernel(
    prepared,
    keys,
    links,
    decays,
    qkv,
    a,
    b,
    runs,
    states,
    borders,
    history,
    pending_qkv,
    pending_gates,
    out,
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
    C: tl.constexpr,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    READ: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    PROGRAMS: tl.constexpr = HV * ((DV + V - 1) // V)
    program, run = tl.program_id(0), tl.program_id(1).to(tl.int64)
    field = runs + run * FIELDS
    if program < PROGRAMS:
        _scan_chunks(
            program, run, prepared, keys, links, decays, field, states, borders, out, max_pending,
            HK, HV, DK, DV, BK, C, V, STAGES, PARTS, READ, PDL,
        )  # fmt: skip
    else:
        keep_raw(
            program - PROGRAMS, tl.num_programs(0) - PROGRAMS, qkv, a, b, field,
            history, pending_qkv, pending_gates, qkv_stride, a_stride, b_stride, max_pending,
            2 * HK * DK + HV * DV, HV, K, KEPT_BLOCK, HEADS, TAPS_BLOCK, PDL,
        )  # fmt: skip


def num_chunks(runs: Runs, rows: int, max_pending: int, tile: ChunkTile) -> int:
    return (rows + runs.rows.count * max_pending) // tile.rows + runs.rows.count + 1


def sizes(rule: GatedDelta) -> dict[str, int]:
    kept = {name: value for name, value in rule.constants.items() if name != "K"}
    return {**kept, "BK": triton.next_power_of_2(rule.key_dim)}


def link(runs: Runs, rule: GatedDelta, prepared, rows: int, max_pending: int, tile: ChunkTile):
    """Keys and queries in parts, triangular matrices and decays of all chunks."""
    count, size = num_chunks(runs, rows, max_pending, tile), tile.rows
    heads, width = rule.num_value_heads, 4 * rule.num_key_heads * rule.key_dim
    made = (
        prepared.new_empty(prepared.shape[0], width, dtype=torch.bfloat16),
        prepared.new_empty(count, heads, 4 * size * size, dtype=torch.bfloat16),
        prepared.new_empty(count, heads, 2 * size),
    )
    most = triton.cdiv(runs.rows.max_rows + max_pending, size)
    _links_kernel[(heads, most, runs.rows.count)](
        prepared, runs.table, *made, max_pending, **sizes(rule), C=size,
        SLICE=min(64, triton.next_power_of_2(rule.key_dim)),
        PRECISION=tile.links, BY_PRODUCTS=tile.by_products,
        num_warps=2 if size == 16 else 4, **pdl_options(prepared),
    )  # fmt: skip
    return made


def advance_chunks(
    runs: Runs, rule: GatedDelta, prepared, links, raw, memory, tile, *, borders=None, read=True
):
    """The prototype of ``advance_prepared``; states are [S, Hv, Dv, Dk]."""
    num_rows, num_channels = raw.mixed.shape
    out = raw.mixed.new_empty(num_rows, rule.out_features)
    batch = runs.table.shape[0]
    programs = rule.num_value_heads * triton.cdiv(rule.value_dim, tile.columns)
    block = KEPT_CHANNELS * tile.warps
    blocks, long = triton.cdiv(num_channels, block), runs.rows.max_rows >= 128
    keepers = num_keepers(programs, batch, tile.warps, blocks, long)
    _advance_chunks_kernel[(programs + keepers, batch)](
        prepared, *links, raw.mixed, *raw.gates, runs.table, memory.states, borders,
        memory.history, memory.pending_mixed, memory.pending_gates, out, *raw.strides,
        memory.max_pending, **sizes(rule), K=rule.conv_kernel, C=tile.rows, V=tile.columns,
        HEADS=triton.next_power_of_2(rule.num_value_heads), KEPT_BLOCK=block,
        TAPS_BLOCK=triton.next_power_of_2(max(rule.conv_kernel - 1, 1)), STAGES=tile.stages,
        PARTS=tile.parts, READ=read, num_warps=tile.warps, maxnreg=tile.max_registers,
        **pdl_options(out, early=not long),
    )  # fmt: skip
    return out


@triton.jit
def _walk_chunks_kernel(
    prepared,
    borders,  # [chunks, HV, DK, DV]
    out,
    total,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Pass 2 of the resync form: the walk of ``_advance_tile`` from every border."""
    TILES: tl.constexpr = (DV + WARPS * V - 1) // (WARPS * V)
    WIDTH: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV + HK
    tile, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = tile // TILES
    key_head = head // (HV // HK)
    key = _keys(BK, LANES)
    warp = (tile % TILES) * WARPS + tl.arange(0, WARPS)
    value = warp[:, None] * V + tl.arange(0, V)[None, :]
    is_key, is_value = key < DK, value < DV
    at_once = key[:, :, :, :, None] * DV + value[None, :, None, None, :]
    state = tl.load(borders + (chunk * HV + head) * DV * DK + at_once)
    prepared += chunk * C * WIDTH
    q_at = prepared + key_head * DK + key
    k_at = q_at + HK * DK
    v_at = prepared + 2 * HK * DK + head * DV + value
    decay_at = prepared + 2 * HK * DK + HV * DV + head
    q_k_at = prepared + WIDTH - HK + key_head
    out += chunk * C * HV * DV + head * DV + value
    for t in tl.range(tl.minimum(C, total - chunk * C).to(tl.int32), num_stages=STAGES):
        at = t * WIDTH
        k = tl.load(k_at + at, is_key, other=0.0)[:, :, :, :, None]
        q = tl.load(q_at + at, is_key, other=0.0)[:, :, :, :, None]
        v = tl.load(v_at + at, is_value, other=0.0)
        decay, beta = tl.load(decay_at + at), tl.load(decay_at + at + HV)
        delta = _delta(state, k, v, decay, beta)
        read = tl.fma(delta, tl.load(q_k_at + at), decay * _along(state, q))
        tl.store(out + t * HV * DV, read.to(out.dtype.element_ty), is_value)
        state = _updated(state, k, decay, delta)


def walk_chunks(rule: GatedDelta, prepared, borders, total: int, dtype, tile: RuleTile, rows: int):
    """Pass 2 for one run from position 0: [total, Hv * Dv]."""
    out = torch.empty(total, rule.out_features, dtype=dtype, device=prepared.device)
    keys = triton.next_power_of_2(rule.key_dim)
    tiles = triton.cdiv(rule.value_dim, tile.value_columns * tile.num_warps)
    _walk_chunks_kernel[(rule.num_value_heads * tiles, triton.cdiv(total, rows))](
        prepared, borders, out, total, **sizes(rule), WARPS=tile.num_warps, V=tile.value_columns,
        LANES=min(keys, max(1, 128 // tile.value_columns)), C=rows, STAGES=4,
        num_warps=tile.num_warps, maxnreg=tile.max_registers,
    )  # fmt: skip
    return out

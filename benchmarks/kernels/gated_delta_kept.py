"""Prototype of ``gated_delta_parallel_gpu.py``: decode in chunks, with the open chunk's rows kept.

A slot keeps, beside the state at the last border, what later rows of the chunk need of each row:
its key in bf16 parts, its row of the inverse, its right-hand side and its decay since the border.
So a step reads the state, and writes it at borders only.
"""

# ruff: noqa: PLR0913, PLR0915
# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from gated_delta_chunks import _product, _split, sizes
from torch import Tensor

from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.recurrent.runs import FIELDS, FIRST_ROW, NUM_ROWS, SLOT, fact
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options

#: Rows of a pass that one tile of products holds, as keys and as queries.
MOST_ROWS = 4


@dataclass(frozen=True)
class KeptRows:
    """Rows of S slots' open chunks of C rows in one layer.

    Attributes:
        states: [S, Hv, Dv, Dk], at the last border.
        keys: [S, Hk, C, 2 * Dk] bf16, larger parts, then smaller ones.
        inverse: [S, Hv, C, C].
        targets: [S, Hv, C, Dv], values minus what the state holds for their keys.
        since: [S, Hv, C], logarithm of the decay since the border.
    """

    states: Tensor
    keys: Tensor
    inverse: Tensor
    targets: Tensor
    since: Tensor

    @classmethod
    def of(cls, rule: GatedDelta, slots: int, rows: int, device: str) -> KeptRows:
        keys, heads = rule.num_key_heads, rule.num_value_heads

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(slots, *shape, device=device, dtype=dtype)

        return cls(
            zeros(heads, rule.value_dim, rule.key_dim),
            zeros(keys, rows, 2 * rule.key_dim, dtype=torch.bfloat16),
            zeros(heads, rows, rows),
            zeros(heads, rows, rule.value_dim),
            zeros(heads, rows),
        )


@triton.jit(do_not_specialize=["max_pending"])
def _step_kernel(
    prepared,  # [rows, WIDTH], new rows of each run
    asked_parts,  # [rows, HK, 4 * DK] bf16, their k and q in parts, as of ``link``
    runs,  # [B, FIELDS]
    num_open,  # [S] rows of the open chunk
    states,
    kept_keys,
    inverses,
    targets,
    decays,
    out,  # [T, HV * DV], written
    max_pending,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    TILES: tl.constexpr = (DV + V - 1) // V
    WIDTH: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV + HK
    tile, run = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, place = tile // TILES, tile % TILES
    key_head = head // (HV // HK)
    field = runs + run * FIELDS
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows = fact(field, NUM_ROWS).to(tl.int32)
    opened = tl.load(num_open + slot).to(tl.int32)
    row, key = tl.arange(0, C), tl.arange(0, BK)
    value = place * V + tl.arange(0, V)
    is_key, is_value = key < DK, value < DV
    head_of = slot * HV + head
    state_at = states + head_of * DV * DK + value[:, None] * DK + key[None, :]
    inside = is_value[:, None] & is_key[None, :]
    state = tl.load(state_at, inside, other=0.0, cache_modifier=".cg")
    # The previous step wrote these before ``plan_runs``, a PDL barrier.
    held, other = row < opened, tl.arange(0, C)
    inverse_at = inverses + head_of * C * C + row[:, None] * C + other[None, :]
    inverse = tl.load(inverse_at, held[:, None] & (other >= 0)[None, :], other=0.0)
    target_at = targets + head_of * C * DV + row[None, :] * DV + value[:, None]
    target = tl.load(target_at, is_value[:, None] & held[None, :], other=0.0)
    log_since = tl.load(decays + head_of * C + row, held, other=0.0)
    parts = _split(state, 2)
    gdc_wait(PDL)

    base = first_row + run * max_pending
    prepared += base * WIDTH
    # Keys, then queries, of the new rows; the preparation has put the keys among the kept ones.
    both, new = tl.arange(0, 2 * ROWS), row - opened
    is_new = (new >= 0) & (new < num_rows)
    asked_at = asked_parts + (base + both % ROWS)[:, None] * (4 * HK * DK) + key[None, :]
    asked_at += key_head * 4 * DK + tl.where(both < ROWS, 0, 2 * DK)[:, None]
    asked_mask = (both % ROWS < num_rows)[:, None] & is_key[None, :]
    kept_at = kept_keys + (slot * HK + key_head) * C * 2 * DK
    kept_at += row[:, None] * (2 * DK) + key[None, :]
    key_mask = (held | is_new)[:, None] & is_key[None, :]
    asked_high = tl.load(asked_at, asked_mask, other=0.0)
    asked_low = tl.load(asked_at + DK, asked_mask, other=0.0)
    high = tl.load(kept_at, key_mask, other=0.0, cache_modifier=".cg")
    low = tl.load(kept_at + DK, key_mask, other=0.0, cache_modifier=".cg")
    across = (tl.trans(asked_high), tl.trans(asked_low))
    read = _product(parts, across, tl.zeros((V, 2 * ROWS), tl.float32), 2)
    alike = _product((high, low), across, tl.zeros((C, 2 * ROWS), tl.float32), 2)
    gate_at = prepared + 2 * HK * DK + HV * DV + head
    v_at = prepared + 2 * HK * DK + head * DV + value
    logged = tl.sum(tl.where(row == opened - 1, log_since, 0.0), axis=0)
    reads = tl.zeros((C, 2 * ROWS), tl.float32)
    for r in range(num_rows):
        at = opened + r
        logged += tl.log(tl.maximum(tl.load(gate_at + r * WIDTH), 1e-37))
        beta = tl.load(gate_at + HV + r * WIDTH)
        log_since = tl.where(row == at, logged, log_since)
        ratio = tl.exp(tl.minimum(logged - log_since, 0.0))
        mine = tl.sum(tl.where((both == r)[None, :], alike, 0.0), axis=1)
        a = tl.where(row < at, mine * ratio * beta, 0.0)
        # Rows of the inverse carry their betas.
        found = tl.sum(a[:, None] * inverse, axis=0)
        own = tl.where(other == at, beta, -found)
        inverse = tl.where((row == at)[:, None], own[None, :], inverse)
        asks = tl.sum(tl.where((both == ROWS + r)[None, :], alike, 0.0), axis=1)
        asks = tl.where(row <= at, asks * ratio, 0.0)
        reads = tl.where((both == ROWS + r)[None, :], asks[:, None], reads)
        holds = tl.sum(tl.where((both == r)[None, :], read, 0.0), axis=1)
        v = tl.load(v_at + r * WIDTH, is_value, other=0.0)
        fresh = v - holds * tl.exp(logged)
        target = tl.where((row == at)[None, :], fresh[:, None], target)
        faded = tl.where((both == ROWS + r)[None, :], tl.exp(logged), 1.0)
        read = read * faded
    deltas = _product(
        _split(target, 2), _split(tl.trans(inverse), 2), tl.zeros((V, C), tl.float32), 2
    )
    read = _product(_split(deltas, 2), _split(reads, 2), read, 2)
    is_row = (both >= ROWS) & (both - ROWS < num_rows)
    out_at = out + (first_row + both - ROWS)[None, :] * HV * DV + head * DV + value[:, None]
    tl.store(out_at, read.to(out.dtype.element_ty), is_value[:, None] & is_row[None, :])
    if opened + num_rows >= C:
        total = tl.sum(tl.where(row == C - 1, log_since, 0.0), axis=0)
        until = tl.exp(total - log_since)
        faded_deltas = _split(deltas * until[None, :], 2)
        # Loaded again: registers are short.
        state = tl.load(state_at, inside, other=0.0, cache_modifier=".cg")
        state = _product(faded_deltas, (high, low), state * tl.exp(total), 2)
        tl.store(state_at, state, inside)
    else:
        tl.store(target_at, target, is_value[:, None] & is_new[None, :])
        if place == 0:
            tl.store(inverse_at, inverse, is_new[:, None] & (other >= 0)[None, :])
            tl.store(decays + head_of * C + row, log_since, is_new)


def asked_of(rule: GatedDelta, prepared: Tensor) -> Tensor:
    """k and q of prepared rows in parts; the preparation would write them."""
    width = rule.num_key_heads * rule.key_dim
    q, k = (
        prepared[:, first : first + width].unflatten(1, (-1, rule.key_dim)) for first in (0, width)
    )
    parts = []
    for x in (k, q):
        high = ((x.view(torch.int32) + 0x8000) & -65536).view(torch.float32)
        parts += [high.bfloat16(), (x - high).bfloat16()]
    return torch.cat(parts, dim=-1).contiguous()


def step(runs, rule: GatedDelta, prepared, asked, num_open, kept: KeptRows, out, max_pending, tile):
    """Run the new rows of each run inside the open chunk: into ``out`` [T, Hv * Dv]."""
    programs = rule.num_value_heads * triton.cdiv(rule.value_dim, tile.columns)
    _step_kernel[(programs, runs.table.shape[0])](
        prepared, asked, runs.table, num_open, kept.states, kept.keys, kept.inverse, kept.targets,
        kept.since, out, max_pending, **sizes(rule), C=tile.rows, V=tile.columns, ROWS=MOST_ROWS,
        num_warps=tile.warps, maxnreg=tile.max_registers, **pdl_options(out),
    )  # fmt: skip
    return out

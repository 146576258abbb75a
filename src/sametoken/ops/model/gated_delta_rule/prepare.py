"""The short convolution, the norms of q and k, and the gates of a pass's rows, on a GPU."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.gated_delta_rule.reference import NORM_EPS
from sametoken.ops.model.gated_delta_rule.rule import GatedDeltaParams
from sametoken.ops.model.recurrent.convolution_triton import (
    completed_rows,
    conv_weights,
    convolve_channels,
    convolved,
    held_rows,
    moved_on,
    own_part,
    parts_of,
    pending_or_new,
    rows_to_prepare,
    sigmoid,
    softplus,
)
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import FIELDS, Runs
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options

_EPS = tl.constexpr(NORM_EPS)
# Channels of v per program.
_VALUES = 256


@triton.jit
def _prepare_keys(
    head,
    raw,
    span,  # first row, end row
    prepared,  # [rows, WIDTH] of the run, written
    conv_weight,
    conv_bias,
    HK: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One key head's q, k and q . k: q and k normalised, q scaled by 1 / sqrt(Dk)."""
    column = tl.arange(0, triton.next_power_of_2(DK))
    inside = column < DK
    channel = head * DK + column
    k_channel = channel + HK * DK
    weights, bias = conv_weights(conv_weight, conv_bias, channel, inside, C, K)
    k_weights, k_bias = conv_weights(conv_weight, conv_bias, k_channel, inside, C, K)
    begin, end = span
    q_rows = held_rows(raw, begin, channel, inside, C, K)
    k_rows = held_rows(raw, begin, k_channel, inside, C, K)
    gdc_wait(PDL)
    q_rows = completed_rows(q_rows, raw, begin, channel, inside, K)
    k_rows = completed_rows(k_rows, raw, begin, k_channel, inside, K)
    for t in range(begin, end):
        at = pending_or_new(raw, t + K - 1, C)
        q_newest = tl.load(at + channel, inside, other=0.0).to(tl.float32)
        k_newest = tl.load(at + k_channel, inside, other=0.0).to(tl.float32)
        q = convolved(q_rows, q_newest, weights, bias, K)
        k = convolved(k_rows, k_newest, k_weights, k_bias, K)
        scale = tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * DK**-0.5
        k_scale = tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
        q_k = tl.sum(q * k, axis=0) * scale * k_scale
        row = prepared + t * WIDTH
        tl.store(row + channel, q * scale, inside)
        tl.store(row + k_channel, k * k_scale, inside)
        tl.store(row + WIDTH - HK + head, q_k)
        q_rows, k_rows = moved_on(q_rows, q_newest), moved_on(k_rows, k_newest)


@triton.jit
def _prepare_gates(
    gates,  # a, b, their strides, pending gates of the slot
    first_new,  # row of the pass minus its index among folded and new rows
    num_folded,
    span,
    prepared,
    A_log,
    dt_bias,
    HV: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decay and beta of every value head."""
    head = tl.arange(0, triton.next_power_of_2(HV))
    inside = head < HV
    rate = tl.exp(tl.load(A_log + head, inside, other=0.0).to(tl.float32))
    shift = tl.load(dt_bias + head, inside, other=0.0).to(tl.float32)
    a, b, a_stride, b_stride, pending = gates
    gdc_wait(PDL)
    begin, end = span
    for t in range(begin, end):
        is_new, held, row = t >= num_folded, pending + t * 2 * HV, first_new + t
        raw_a = tl.load(tl.where(is_new, a + row * a_stride, held) + head, inside, other=0.0)
        raw_b = tl.load(tl.where(is_new, b + row * b_stride, held + HV) + head, inside, other=0.0)
        gate = prepared + t * WIDTH + C + head
        tl.store(gate, tl.exp(-rate * softplus(raw_a.to(tl.float32) + shift)), inside)
        tl.store(gate + HV, sigmoid(raw_b.to(tl.float32)), inside)


@triton.jit(do_not_specialize=["max_pending", "first_run", "num_runs", "each"])
def _prepare_kernel(
    qkv,  # [T, C], rows qkv_stride apart
    a,  # [T, HV], rows a_stride apart
    b,  # [T, HV], rows b_stride apart
    history,  # [S, K - 1, C]
    pending_qkv,  # [S, P, C]
    pending_gates,  # [S, P, 2 * HV]
    A_log,  # [HV]
    dt_bias,  # [HV]
    conv_weight,  # [K, C]
    conv_bias,  # [C] or None
    runs,  # [B, FIELDS]
    prepared,  # [T + B * P, C + 2 * HV + HK], written
    qkv_stride,
    a_stride,
    b_stride,
    max_pending,
    first_run,  # of the launch
    num_runs,
    each,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    # The kernel of the rule may load states from here on.
    gdc_launch_dependents(PDL)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    WIDTH: tl.constexpr = C + 2 * HV + HK
    VALUE_UNITS: tl.constexpr = triton.cdiv(HV * DV, VALUES)
    unit = tl.program_id(0)
    run, part = own_part(runs, first_run, num_runs, each, BLOCK_RUNS)
    field = runs + run * FIELDS
    raw, span, facts = rows_to_prepare(
        field, part, each, qkv, history, pending_qkv, qkv_stride, max_pending, C, K
    )
    slot, first_row, num_folded = facts
    prepared += (first_row + run * max_pending) * WIDTH
    if unit < HK:
        _prepare_keys(unit, raw, span, prepared, conv_weight, conv_bias, HK, DK, C, WIDTH, K, PDL)
    elif unit < HK + VALUE_UNITS:
        convolve_channels(
            2 * HK * DK + (unit - HK) * VALUES, raw, span, prepared, conv_weight, conv_bias,
            C, WIDTH, K, VALUES, PDL,
        )  # fmt: skip
    else:
        gates = (a, b, a_stride, b_stride, pending_gates + slot * max_pending * 2 * HV)
        _prepare_gates(
            gates, first_row - num_folded, num_folded, span, prepared, A_log, dt_bias,
            HV, C, WIDTH, PDL,
        )  # fmt: skip


def prepare(runs: Runs, params: GatedDeltaParams, raw: RawRows, memory: LayerMemory) -> Tensor:
    """Inputs of the rule for folded and new rows of each run: fp32 [T + B * k, C + 2 * Hv + Hk].

    A row is [q | k | v | decay | beta | q . k], q and k normalised, q scaled by 1 / sqrt(Dk).
    Run b starts at its first row plus k * b. Arguments are those of ``triton.advance``.
    """
    rule = params.rule
    weights = (params.A_log, params.dt_bias, params.conv_weight, params.conv_bias)
    assert all(weight is None or weight.is_contiguous() for weight in weights)
    assert raw.mixed.shape[1] == rule.conv_channels == memory.history.shape[2]
    assert params.conv_weight.shape == (rule.conv_kernel, rule.conv_channels)
    batch, heads = runs.table.shape[0], rule.num_value_heads
    num_rows = raw.mixed.shape[0] + batch * memory.max_pending
    width = rule.conv_channels + 2 * heads + rule.num_key_heads
    prepared = memory.states.new_empty(num_rows, width)
    values = min(_VALUES, triton.next_power_of_2(heads * rule.value_dim))
    units = rule.num_key_heads + triton.cdiv(heads * rule.value_dim, values) + 1
    # Separate launches, so that a long run among many short ones is split into parts too.
    for group in runs.rows.groups:
        parts = parts_of(group, raw.mixed.shape[0], memory, units)
        _prepare_kernel[(units, *parts.grid)](
            raw.mixed,
            *raw.gates,
            memory.history,
            memory.pending_mixed,
            memory.pending_gates,
            *weights,
            runs.table,
            prepared,
            *raw.strides,
            memory.max_pending,
            group.first,
            group.num_runs,
            parts.each,
            **rule.constants,
            VALUES=values,
            BLOCK_RUNS=parts.block_runs,
            num_warps=1,
            **pdl_options(prepared),
        )
    return prepared

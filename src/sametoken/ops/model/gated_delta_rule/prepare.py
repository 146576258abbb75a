"""The short convolution, the norms of q and k, and the gates of a pass's rows, on a GPU."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.gated_delta_rule.reference import NORM_EPS
from sametoken.ops.model.gated_delta_rule.rule import GatedDeltaParams
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    NUM_FOLDED,
    NUM_ROWS,
    SLOT,
    Runs,
    fact,
)
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options

_EPS = tl.constexpr(NORM_EPS)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Programs of a launch; each runs several rows if there are more.
_PROGRAMS = 4096
# Channels of v per program.
_VALUES = 256


@triton.jit
def _sigmoid(x):
    # 1 / y as the square of rsqrt(y): cheaper than a division, which handles all ranges.
    root = tl.rsqrt(1.0 + tl.exp2(-_LOG2_E * x))
    return root * root


@triton.jit
def _decay(a, rate, dt_bias):
    shifted = a + dt_bias
    softplus = tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted)))
    return tl.exp(-rate * softplus)


@triton.jit
def _weights(conv_weight, conv_bias, channel, inside, C: tl.constexpr, K: tl.constexpr):
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
def _convolved(rows, newest, weights, bias, K: tl.constexpr):
    """SiLU of the convolution of K - 1 raw rows and the newest one, taps in order."""
    rows += (newest,)
    summed = rows[0] * weights[0]
    for tap in tl.static_range(1, K):
        summed = tl.fma(rows[tap], weights[tap], summed)
    summed += bias
    return summed * _sigmoid(summed)


@triton.jit
def _held_rows(raw, begin, channel, inside, C: tl.constexpr, K: tl.constexpr):
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
def _completed(rows, raw, begin, channel, inside, K: tl.constexpr):
    """Add the pass's rows to those of ``_held_rows``: all K - 1 raw rows from ``begin``."""
    qkv, stride, _, _, first_new, num_held, stop, _ = raw
    completed = ()
    for tap in tl.static_range(K - 1):
        index = begin + tap
        is_new = (index >= num_held) & (index < stop)
        new = tl.load(qkv + (first_new + index) * stride + channel, is_new & inside, other=0.0)
        completed += (tl.where(is_new, new.to(tl.float32), rows[tap]),)  # type: ignore[assignment]
    return completed


@triton.jit
def _moved_on(rows, newest):
    rows += (newest,)
    return rows[1:]


@triton.jit
def _pending_or_new(raw, index, C: tl.constexpr):
    """Pointer to a raw row after the history; ``keep._raw_row`` covers all raw rows."""
    qkv, stride, _, pending, first_new, num_held, _, _ = raw
    return tl.where(index < num_held, pending + index * C, qkv + (first_new + index) * stride)


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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One key head's q, k and q . k: q and k normalised, q scaled by 1 / sqrt(Dk)."""
    column = tl.arange(0, BLOCK)
    inside = column < DK
    channel = head * DK + column
    k_channel = channel + HK * DK
    weights, bias = _weights(conv_weight, conv_bias, channel, inside, C, K)
    k_weights, k_bias = _weights(conv_weight, conv_bias, k_channel, inside, C, K)
    begin, end = span
    q_rows = _held_rows(raw, begin, channel, inside, C, K)
    k_rows = _held_rows(raw, begin, k_channel, inside, C, K)
    gdc_wait(PDL)
    q_rows = _completed(q_rows, raw, begin, channel, inside, K)
    k_rows = _completed(k_rows, raw, begin, k_channel, inside, K)
    for t in range(begin, end):
        at = _pending_or_new(raw, t + K - 1, C)
        q_newest = tl.load(at + channel, inside, other=0.0).to(tl.float32)
        k_newest = tl.load(at + k_channel, inside, other=0.0).to(tl.float32)
        q = _convolved(q_rows, q_newest, weights, bias, K)
        k = _convolved(k_rows, k_newest, k_weights, k_bias, K)
        scale = tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * DK**-0.5
        k_scale = tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
        q_k = tl.sum(q * k, axis=0) * scale * k_scale
        row = prepared + t * WIDTH
        tl.store(row + channel, q * scale, inside)
        tl.store(row + k_channel, k * k_scale, inside)
        tl.store(row + WIDTH - HK + head, q_k)
        q_rows, k_rows = _moved_on(q_rows, q_newest), _moved_on(k_rows, k_newest)


@triton.jit
def _prepare_values(
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
    """Some channels of v."""
    channel = first + tl.arange(0, BLOCK)
    inside = channel < C
    weights, bias = _weights(conv_weight, conv_bias, channel, inside, C, K)
    begin, end = span
    rows = _held_rows(raw, begin, channel, inside, C, K)
    gdc_wait(PDL)
    rows = _completed(rows, raw, begin, channel, inside, K)
    for t in range(begin, end):
        at = _pending_or_new(raw, t + K - 1, C)
        newest = tl.load(at + channel, inside, other=0.0).to(tl.float32)
        v = _convolved(rows, newest, weights, bias, K)
        tl.store(prepared + t * WIDTH + channel, v, inside)
        rows = _moved_on(rows, newest)


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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decay and beta of every value head."""
    head = tl.arange(0, BLOCK)
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
        tl.store(gate, _decay(raw_a.to(tl.float32), rate, shift), inside)
        tl.store(gate + HV, _sigmoid(raw_b.to(tl.float32)), inside)


@triton.jit(do_not_specialize=["max_pending", "first_run"])
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
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    # The kernel of the rule may load states from here on.
    gdc_launch_dependents(PDL)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    WIDTH: tl.constexpr = C + 2 * HV + HK
    VALUE_UNITS: tl.constexpr = (HV * DV + VALUES - 1) // VALUES
    unit, run = tl.program_id(0), first_run + tl.program_id(2).to(tl.int64)
    # ``plan_runs`` is a PDL barrier, so the table is complete.
    field = runs + run * FIELDS
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows, num_folded = fact(field, NUM_ROWS).to(tl.int32), fact(field, NUM_FOLDED).to(tl.int32)
    empty = fact(field, EMPTY) != 0
    total = tl.where(num_rows > 0, num_folded + num_rows, 0)
    each = tl.cdiv(total, tl.num_programs(1))
    begin = tl.program_id(1) * each
    span = (begin, tl.minimum(total, begin + each))
    prepared += (first_row + run * max_pending) * WIDTH
    num_held = num_folded + K - 1
    # Stored and new rows are indexed from the oldest of the history.
    raw = (
        qkv, qkv_stride, history + slot * (K - 1) * C,
        pending_qkv + (slot * max_pending - (K - 1)) * C, first_row - num_held,
        num_held, total + K - 1, empty,
    )  # fmt: skip
    if unit < HK:
        _prepare_keys(
            unit, raw, span, prepared, conv_weight, conv_bias, HK, DK, C, WIDTH, K, KEYS, PDL
        )
    elif unit < HK + VALUE_UNITS:
        _prepare_values(
            2 * HK * DK + (unit - HK) * VALUES, raw, span, prepared, conv_weight, conv_bias,
            C, WIDTH, K, VALUES, PDL,
        )  # fmt: skip
    else:
        gates = (a, b, a_stride, b_stride, pending_gates + slot * max_pending * 2 * HV)
        _prepare_gates(
            gates, first_row - num_folded, num_folded, span, prepared, A_log, dt_bias,
            HV, C, WIDTH, HEADS, PDL,
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
        most = max(1, _PROGRAMS // (units * group.num_runs))
        parts = min(group.max_rows + memory.max_pending, most)
        _prepare_kernel[(units, parts, group.num_runs)](
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
            **params.rule.constants,
            KEYS=triton.next_power_of_2(rule.key_dim),
            VALUES=values,
            HEADS=triton.next_power_of_2(heads),
            num_warps=1,
            **pdl_options(prepared),
        )
    return prepared

"""The short convolution and the time steps of a pass's rows, on a GPU."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.mamba2.rule import Mamba2Params
from sametoken.ops.model.recurrent.convolution_triton import (
    convolve_channels,
    own_part,
    parts_of,
    rows_to_prepare,
    softplus,
)
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import FIELDS, Runs
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options

# Channels of [x | B | C] per program.
_CHANNELS = 256


@triton.jit
def time_step(raw, limit):
    """softplus(raw) within the limit, least and largest time step."""
    least, largest = limit
    step = tl.minimum(tl.maximum(softplus(raw), least), largest)
    # A maximum drops NaN, which must reach the logits.
    return tl.where(raw == raw, step, raw)


@triton.jit
def _prepare_steps(
    gate,  # dt, its stride, pending gates of the slot
    first_new,  # row of the pass minus its index among folded and new rows
    num_folded,
    span,
    prepared,
    A_log,
    dt_bias,
    limit,  # least and largest time step
    H: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decay and time step of every head."""
    head = tl.arange(0, triton.next_power_of_2(H))
    inside = head < H
    rate = tl.exp(tl.load(A_log + head, inside, other=0.0).to(tl.float32))
    shift = tl.load(dt_bias + head, inside, other=0.0).to(tl.float32)
    dt, stride, pending = gate
    gdc_wait(PDL)
    begin, end = span
    for t in range(begin, end):
        at = tl.where(t >= num_folded, dt + (first_new + t) * stride, pending + t * H)
        raw = tl.load(at + head, inside, other=0.0).to(tl.float32) + shift
        step = time_step(raw, limit)
        target = prepared + t * WIDTH + C + head
        tl.store(target, tl.exp(-rate * step), inside)
        tl.store(target + H, step, inside)


@triton.jit(do_not_specialize=["max_pending", "first_run", "least", "largest", "num_runs", "each"])
def _prepare_kernel(
    mixed,  # [T, C], rows mixed_stride apart
    dt,  # [T, H], rows dt_stride apart
    history,  # [S, K - 1, C]
    pending_mixed,  # [S, P, C]
    pending_gates,  # [S, P, H]
    A_log,  # [H]
    dt_bias,  # [H]
    conv_weight,  # [K, C]
    conv_bias,  # [C] or None
    runs,  # [B, FIELDS]
    prepared,  # [T + B * P + 1, C + 2 * H], written
    mixed_stride,
    dt_stride,
    max_pending,
    first_run,  # of the launch
    num_runs,
    each,
    least,
    largest,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    # The kernel of the rule may load states from here on.
    gdc_launch_dependents(PDL)
    C: tl.constexpr = H * P + 2 * G * N
    WIDTH: tl.constexpr = C + 2 * H
    CHANNEL_UNITS: tl.constexpr = triton.cdiv(C, CHANNELS)
    unit = tl.program_id(0)
    run, part = own_part(runs, first_run, num_runs, each, BLOCK_RUNS)
    raw, span, facts = rows_to_prepare(
        runs + run * FIELDS, part, each, mixed, history, pending_mixed, mixed_stride, max_pending,
        C, K,
    )  # fmt: skip
    slot, first_row, num_folded = facts
    prepared += (first_row + run * max_pending) * WIDTH
    if unit < CHANNEL_UNITS:
        convolve_channels(
            unit * CHANNELS, raw, span, prepared, conv_weight, conv_bias,
            C, WIDTH, K, CHANNELS, PDL,
        )  # fmt: skip
    else:
        gate = (dt, dt_stride, pending_gates + slot * max_pending * H)
        _prepare_steps(
            gate, first_row - num_folded, num_folded, span, prepared, A_log, dt_bias,
            (least, largest), H, C, WIDTH, PDL,
        )  # fmt: skip


def prepare(runs: Runs, params: Mamba2Params, raw: RawRows, memory: LayerMemory) -> Tensor:
    """Inputs of the rule for folded and new rows of each run: fp32 [T + B * k + 1, C + 2 * H].

    A row is [x | B | C | decay | step]. Run b starts at its first row plus k * b; the last row is
    for runs without rows, whose first row may be read. Arguments are those of ``triton.advance``.
    """
    rule = params.rule
    weights = (params.A_log, params.dt_bias, params.conv_weight, params.conv_bias)
    assert all(weight is None or weight.is_contiguous() for weight in weights)
    assert raw.mixed.shape[1] == rule.conv_channels == memory.history.shape[2]
    assert params.conv_weight.shape == (rule.conv_kernel, rule.conv_channels)
    batch, width = runs.table.shape[0], rule.conv_channels + 2 * rule.num_heads
    most_rows = raw.mixed.shape[0] + batch * memory.max_pending
    prepared = memory.states.new_empty(most_rows + 1, width)
    channels = min(_CHANNELS, triton.next_power_of_2(rule.conv_channels))
    units = triton.cdiv(rule.conv_channels, channels) + 1
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
            *params.time_step_limit,
            **rule.constants,
            CHANNELS=channels,
            BLOCK_RUNS=parts.block_runs,
            num_warps=1,
            **pdl_options(prepared),
        )
    return prepared

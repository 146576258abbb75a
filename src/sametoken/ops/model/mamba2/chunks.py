"""Mamba-2 by chunks of 64 positions, for prompts in the fast form, in Triton.

Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 6. In a chunk that begins with
state S, row i has decay e_i, the product of its own and those before it in the chunk, and time step
s_i. With the skip D:

    y_i = e_i S c_i + sum over j <= i of e_i / e_j (c_i b_j) s_j x_j + D x_i
    S' = e_63 S + sum over j of e_63 / e_j s_j x_j b_j

Three kernels: ``_prepare`` makes rows of x, B and C and their gates, ``_mix`` adds what rows of a
chunk have of each other, ``_scan`` runs the chunks of a prompt in order, for some rows of a head's
state, and adds what they have of it. Operands, and the first of these sums, are rounded to the
dtype of the raw rows; states and other sums are fp32. A chunk has its bits whatever else runs
beside it. The reference is ``chunk_reference.advance_chunk``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.hopper import shared_memory
from sametoken.ops.model.mamba2.prepare import time_step
from sametoken.ops.model.mamba2.rule import Mamba2Params
from sametoken.ops.model.recurrent.chunks_triton import (
    CHUNK,
    PARTS,
    convolved_part,
    fill_broken,
    keep_history,
    part_to_prepare,
    run_to_scan,
    store_gates,
    store_part,
    tile_size,
)
from sametoken.ops.model.recurrent.rule import FAST_ROWS, LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import CHUNK_FIELDS, CHUNK_ROW, CHUNK_ROWS, FastRuns
from sametoken.ops.triton_versions import FUSED

# Of a head and row: log(e), s, and e_63 / e_i s, which the state after the chunk has of it.
_GATES = tl.constexpr(3)
# Rows of a head's state in a program of ``_scan``: the fewest rows of a product on Hopper.
_ROWS = 64
# Bytes of shared memory that it has beside its load pipeline, at most.
_BESIDE = 16 << 10


@triton.jit
def _prepare_gates(
    dt,  # [T, H], rows stride apart
    stride,
    raw,
    A_log,
    dt_bias,
    limit,  # least and largest time step
    gates,  # [GATES, H, CHUNK] of the chunk, written
    H: tl.constexpr,
):
    """Of a chunk's rows; those that it lacks keep the state as it is."""
    _, _, row, num_rows, _, _ = raw
    index = tl.arange(0, CHUNK)[:, None]
    head = tl.arange(0, triton.next_power_of_2(H))[None, :]
    inside = head < H
    exists = inside & (index < num_rows)
    rate = tl.exp(tl.load(A_log + head, inside, other=0.0).to(tl.float32))
    shift = tl.load(dt_bias + head, inside, other=0.0).to(tl.float32)
    raw_dt = tl.load(dt + (row + index) * stride + head, exists, other=0.0).to(tl.float32)
    step = tl.where(exists, time_step(raw_dt + shift, limit), 0.0)
    own = -rate * step
    after = tl.cumsum(own, 0, reverse=True) - own
    store_gates(gates, (tl.cumsum(own, 0), step, step * tl.exp(after)), H)


@triton.jit(do_not_specialize=["least", "largest"])
def _prepare_kernel(
    mixed,  # [T, C], rows mixed_stride apart
    dt,  # [T, H], rows dt_stride apart
    history,  # [S, K - 1, C]
    A_log,  # [H]
    dt_bias,  # [H]
    conv_weight,  # [K, C]
    conv_bias,  # [C] or None
    chunks,  # [M, CHUNK_FIELDS]
    values,  # [M, H, P, CHUNK], written: x
    shared,  # [M, CHUNK, 2, G, N], written: B and C
    gates,  # [M, GATES, H, CHUNK] fp32, written: log(e), s, e_63 / e_i s
    mixed_stride,
    dt_stride,
    least,
    largest,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    C: tl.constexpr = H * P + 2 * G * N
    unit = tl.program_id(1)
    chunk, first, raw = part_to_prepare(chunks, mixed, mixed_stride, history, C, K)
    _, _, _, num_rows, _, _ = raw
    if unit == H + 2 * G:
        if (first == 0) & (num_rows > 0):
            gates += chunk * _GATES * H * CHUNK
            _prepare_gates(dt, dt_stride, raw, A_log, dt_bias, (least, largest), gates, H)
    elif first + num_rows > 0:
        if unit < H:
            out = values + (chunk * H + unit) * P * CHUNK + first
            x = convolved_part(raw, unit * P, conv_weight, conv_bias, P, C, K)
            store_part(out, x, (1, CHUNK), P)
        else:
            out = shared + ((chunk * CHUNK + first) * 2 * G + unit - H) * N
            b_or_c = convolved_part(raw, H * P + (unit - H) * N, conv_weight, conv_bias, N, C, K)
            store_part(out, b_or_c, (2 * G * N, 1), N)


@triton.jit
def _mix_kernel(
    values,  # [M, H, P, CHUNK]
    shared,  # [M, CHUNK, 2, G, N]
    gates,  # [M, GATES, H, CHUNK]
    skip,  # [H]
    chunks,  # [M, CHUNK_FIELDS]
    out,  # [T, H * P], written
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
):
    """What rows of a chunk have of each other and of themselves, for the heads of a group."""
    EACH: tl.constexpr = H // G
    chunk, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    field = chunks + chunk * CHUNK_FIELDS
    row, num_rows = tl.load(field + CHUNK_ROW), tl.load(field + CHUNK_ROWS)
    if num_rows == 0:
        return
    index, column = tl.arange(0, CHUNK), tl.arange(0, tile_size(N))[None, :]
    element = tl.arange(0, tile_size(P))
    b_at = shared + ((chunk * CHUNK + index[:, None]) * 2 * G + group) * N + column
    b = tl.load(b_at, column < N, other=0.0)
    c = tl.load(b_at + G * N, column < N, other=0.0)
    c_b = tl.dot(c, b.T, input_precision="ieee")
    until, same = index[:, None] >= index[None, :], index[:, None] == index[None, :]
    x_at = values + chunk * H * P * CHUNK + element[:, None] * CHUNK + index[None, :]
    out += (row + index[:, None]) * H * P + element[None, :]
    exists = (index < num_rows)[:, None] & (element < P)[None, :]
    for head in range(group * EACH, (group + 1) * EACH):
        gate_at = gates + (chunk * _GATES * H + head) * CHUNK + index
        log_decay, step = tl.load(gate_at), tl.load(gate_at + H * CHUNK)
        # Above the diagonal the exponential could overflow.
        ratio = tl.exp(tl.where(until, log_decay[:, None] - log_decay[None, :], -float("inf")))
        weight = c_b * ratio * step[None, :]
        weight += tl.where(same, tl.load(skip + head).to(tl.float32), 0.0)
        x = tl.load(x_at + head * P * CHUNK, (element < P)[:, None], other=0.0)
        mixed = tl.dot(weight.to(x.dtype), x.T, input_precision="ieee")
        tl.store(out + head * P, mixed.to(out.dtype.element_ty), exists)


@triton.jit
def _run_chunk(state, b, c, x, log_decay, log_last, lasting):
    """The state after a chunk, and what its rows have of the one before."""
    read = tl.dot(state.to(c.dtype), c.T, input_precision="ieee") * tl.exp(log_decay)[None, :]
    added = (x.to(tl.float32) * lasting[None, :]).to(x.dtype)
    return tl.dot(added, b, state * tl.exp(log_last), input_precision="ieee"), read


@triton.jit(do_not_specialize=["first_run"])
def _scan_kernel(
    values,  # [M, H, P, CHUNK]
    shared,  # [M, CHUNK, 2, G, N]
    gates,  # [M, GATES, H, CHUNK]
    runs,  # [B, FIELDS]
    first_chunks,  # [R]
    mixed,  # [T, C], rows mixed_stride apart
    states,  # [S, H, P, N], written
    history,  # [S, K - 1, C], written
    out,  # [T, H * P], of which rows have what ``_mix`` adds
    mixed_stride,
    first_run,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums are transposed, [rows of a state, rows of a chunk].

    So each product's left operand, a state or x, is in registers.
    """
    TILES: tl.constexpr = triton.cdiv(P, ROWS)
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    chunk, facts = run_to_scan(runs, first_chunks, first_run)
    slot, first, num_rows, begun, bad_rows = facts
    index, column = tl.arange(0, CHUNK), tl.arange(0, tile_size(N))[None, :]
    element = tile * ROWS + tl.arange(0, ROWS)
    is_element, is_column = element < P, column < N
    inside = is_element[:, None] & is_column
    state_at = states + (slot * H + head) * P * N + element[:, None] * N + column
    state = tl.load(state_at, inside & begun, other=0.0)
    # Of the run's first chunk.
    values += (chunk * H + head) * P * CHUNK
    shared += (chunk * CHUNK * 2 * G + head // (H // G)) * N
    gates += (chunk * _GATES * H + head) * CHUNK
    out += first * H * P + head * P + element[None, :]
    b_at, x_at = index[:, None] * (2 * G * N) + column, element[:, None] * CHUNK + index[None, :]
    for i in tl.range(tl.cdiv(num_rows, CHUNK), num_stages=STAGES):
        row = index + i * CHUNK
        b = tl.load(shared + i * (CHUNK * 2 * G * N) + b_at, is_column, other=0.0)
        c = tl.load(shared + i * (CHUNK * 2 * G * N) + G * N + b_at, is_column, other=0.0)
        x = tl.load(values + i * (H * P * CHUNK) + x_at, is_element[:, None], other=0.0)
        gate_at = gates + i * (_GATES * H * CHUNK)
        log_decay, log_last = tl.load(gate_at + index), tl.load(gate_at + CHUNK - 1)
        # Loaded, so that x goes to registers once; a factor of a scalar would move it twice.
        lasting = tl.load(gate_at + 2 * H * CHUNK + index)
        exists = (row < num_rows)[:, None] & is_element[None, :]
        own = tl.load(out + row[:, None] * (H * P), exists, other=0.0)
        state, read = _run_chunk(state, b, c, x, log_decay, log_last, lasting)
        read = read.T + own.to(tl.float32)
        tl.store(out + row[:, None] * (H * P), read.to(out.dtype.element_ty), exists)

    tl.store(state_at, state, inside & (num_rows > 0))
    if (K > 1) & (num_rows > 0):
        keep_history(mixed, mixed_stride, history, facts, H * P + 2 * G * N, K - 1)
    fill_broken(out, H * P, bad_rows, is_element[None, :])


def advance_chunks(
    fast: FastRuns,
    params: Mamba2Params,
    raw: RawRows,
    memory: LayerMemory,
    out: Tensor,
) -> None:
    """Convolution and state space rule of the fast runs of a pass in one layer.

    Args:
        fast: the runs; those that do not follow their slot's rows give NaN.
        params: the layer's weights.
        raw: the pass's rows, in the dtype of ``memory``.
        memory: of which states and history are written.
        out: [T, H * P], of which the fast rows are written.
    """
    rule, count = params.rule, fast.num_chunks
    heads, groups, sizes = rule.num_heads, rule.num_groups, rule.constants
    values = raw.mixed.new_empty(count, heads, rule.head_dim, FAST_ROWS)
    shared = raw.mixed.new_empty(count, FAST_ROWS, 2, groups, rule.state_dim)
    gates = memory.states.new_empty(count, _GATES.value, heads, FAST_ROWS)
    _prepare_kernel[(count * PARTS.value, heads + 2 * groups + 1)](
        raw.mixed,
        *raw.gates,
        memory.history,
        params.A_log,
        params.dt_bias,
        params.conv_weight,
        params.conv_bias,
        fast.chunks,
        values,
        shared,
        gates,
        *raw.strides,
        *params.time_step_limit,
        **sizes,
        num_warps=8,
        **FUSED,
    )
    _mix_kernel[(count, groups)](
        values,
        shared,
        gates,
        params.D,
        fast.chunks,
        out,
        **{name: sizes[name] for name in ("H", "P", "G", "N")},
        num_warps=4,
        **FUSED,
    )
    rows, width = min(_ROWS, tile_size(rule.head_dim)), tile_size(rule.state_dim)
    held = FAST_ROWS * (2 * width + rows) * raw.mixed.itemsize
    _scan_kernel[(heads * triton.cdiv(rule.head_dim, rows), fast.num_runs)](
        values,
        shared,
        gates,
        fast.runs,
        fast.first_chunks,
        raw.mixed,
        memory.states,
        memory.history,
        out,
        raw.strides[0],
        fast.first_run,
        **sizes,
        ROWS=rows,
        # As many as shared memory holds.
        STAGES=max(1, min(3, (shared_memory(out) - _BESIDE) // held)),
        # A warp group holds 128 columns of a state.
        num_warps=max(4, width // 32),
        **FUSED,
    )

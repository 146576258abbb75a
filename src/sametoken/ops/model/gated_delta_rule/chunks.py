"""Gated DeltaNet by chunks of 64 positions, for prompts in the fast form, in Triton.

Yang et al., "Gated Delta Networks" (arXiv:2412.06464), section 3.3. In a chunk that begins with
state S, row i has decay e_i, the product of its own and those before it in the chunk, gate b_i,
and the delta d_i that it adds to the state along its key:

    d_i = b_i (v_i - e_i S k_i - sum over j < i of e_i / e_j (k_j k_i) d_j)
    o_i = e_i S q_i + sum over j <= i of e_i / e_j (k_j q_i) d_j
    S' = e_63 S + sum over j of e_63 / e_j d_j k_j

So deltas are (I + A)^-1 applied to b (v - e S k), for a strictly lower triangular A. Three kernels:
``_prepare`` makes rows of q, k and v and their gates, ``_solve`` each chunk's (I + A)^-1 and its
weights of q, ``_scan`` runs the chunks of a prompt in order, for some columns of a head's state.
Operands are rounded to the dtype of the raw rows, sums and states are fp32. A chunk has its bits
whatever else runs beside it. The reference is ``reference.advance_chunk``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.hopper import shared_memory
from sametoken.ops.model.gated_delta_rule.reference import NORM_EPS
from sametoken.ops.model.gated_delta_rule.rule import GatedDeltaParams
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
from sametoken.ops.model.recurrent.convolution_triton import sigmoid, softplus
from sametoken.ops.model.recurrent.rule import FAST_ROWS, LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import CHUNK_FIELDS, CHUNK_ROWS, FastRuns
from sametoken.ops.triton_versions import FUSED

_EPS = tl.constexpr(NORM_EPS)
# Rows and columns of the diagonal blocks that ``_inverse`` solves row by row.
_BLOCK = tl.constexpr(16)
# Columns of a head's state in a program of ``_scan``: the fewest rows of a product on Hopper.
_COLUMNS = 64


@triton.jit
def _prepare_gates(raw, num_rows, A_log, dt_bias, gates, HV: tl.constexpr):
    """log(e) and b of a chunk's rows; rows that it lacks keep the state as it is."""
    a, b, a_stride, b_stride = raw
    index = tl.arange(0, CHUNK)[:, None]
    head = tl.arange(0, triton.next_power_of_2(HV))[None, :]
    inside = head < HV
    exists = inside & (index < num_rows)
    rate = tl.exp(tl.load(A_log + head, inside, other=0.0).to(tl.float32))
    raw_a = tl.load(a + index * a_stride + head, exists, other=0.0).to(tl.float32)
    raw_b = tl.load(b + index * b_stride + head, exists, other=0.0).to(tl.float32)
    shifted = raw_a + tl.load(dt_bias + head, inside, other=0.0).to(tl.float32)
    decay = tl.cumsum(tl.where(exists, -rate * softplus(shifted), 0.0), 0)
    store_gates(gates, (decay, tl.where(exists, sigmoid(raw_b), 0.0)), HV)


@triton.jit
def _of_length(scale, x, D: tl.constexpr):
    """Rows of D elements, scaled to this length."""
    inside = tl.arange(0, tile_size(D))[None, :] < D
    return x * (scale * tl.rsqrt(tl.sum(tl.where(inside, x * x, 0.0), 1) + _EPS))[:, None]


@triton.jit
def _prepare_kernel(
    qkv,  # [T, C], rows qkv_stride apart
    a,  # [T, HV], rows a_stride apart
    b,  # [T, HV], rows b_stride apart
    history,  # [S, K - 1, C]
    A_log,  # [HV]
    dt_bias,  # [HV]
    conv_weight,  # [K, C]
    conv_bias,  # [C] or None
    chunks,  # [N, CHUNK_FIELDS]
    keys,  # [N, CHUNK, 2, HK, DK], written: q and k in length 1, q scaled by 1 / sqrt(DK)
    values,  # [N, HV, DV, CHUNK], written
    gates,  # [N, 2, HV, CHUNK] fp32, written: log(e) and b
    qkv_stride,
    a_stride,
    b_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
):
    C: tl.constexpr = 2 * HK * DK + HV * DV
    unit = tl.program_id(1)
    chunk, first, raw = part_to_prepare(chunks, qkv, qkv_stride, history, C, K)
    _, _, row, num_rows, _, _ = raw
    if unit == 2 * HK + HV:
        if (first == 0) & (num_rows > 0):
            gates += chunk * 2 * HV * CHUNK
            of_gates = a + row * a_stride, b + row * b_stride, a_stride, b_stride
            _prepare_gates(of_gates, num_rows, A_log, dt_bias, gates, HV)
    elif first + num_rows > 0:
        if unit < 2 * HK:
            length = tl.where(unit < HK, DK**-0.5, 1.0)
            out = keys + ((chunk * CHUNK + first) * 2 * HK + unit) * DK
            key = convolved_part(raw, unit * DK, conv_weight, conv_bias, DK, C, K)
            store_part(out, _of_length(length, key, DK), (2 * HK * DK, 1), DK)
        else:
            head = unit - 2 * HK
            channel = 2 * HK * DK + head * DV
            out = values + (chunk * HV + head) * DV * CHUNK + first
            value = convolved_part(raw, channel, conv_weight, conv_bias, DV, C, K)
            store_part(out, value, (1, CHUNK), DV)


@triton.jit
def _diagonal_inverses(a):
    """Inverses of the diagonal blocks of I + a: [CHUNK / 16, 16, 16], by forward substitution."""
    COUNT: tl.constexpr = CHUNK // _BLOCK
    block, index = tl.arange(0, COUNT), tl.arange(0, _BLOCK)
    blocks = tl.permute(tl.reshape(a, (COUNT, _BLOCK, COUNT, _BLOCK)), (0, 2, 1, 3))
    is_diagonal = (block[:, None] == block[None, :])[:, :, None, None]
    strict = -tl.sum(tl.where(is_diagonal, blocks, 0.0), axis=1)
    for i in range(1, _BLOCK):
        is_own = index[None, :, None] == i
        own = tl.sum(tl.where(is_own, strict, 0.0), axis=1)
        row = own + tl.sum(own[:, :, None] * strict, axis=1)
        strict = tl.where(is_own, row[:, None, :], strict)
    return strict + tl.where(index[:, None] == index[None, :], 1.0, 0.0)[None]


@triton.jit
def _joined(a, inverses, PAIRS: tl.constexpr, SIZE: tl.constexpr):
    """Inverses of PAIRS diagonal blocks of I + a, given those of their halves, of SIZE rows."""
    pair = tl.arange(0, PAIRS)
    halves = tl.permute(tl.reshape(inverses, (PAIRS, 2, SIZE, SIZE)), (0, 2, 3, 1))
    first, second = tl.split(halves)
    blocks = tl.reshape(a, (PAIRS, 2, SIZE, PAIRS, 2, SIZE))
    left, _ = tl.split(tl.permute(blocks, (0, 3, 2, 5, 1, 4)))
    _, below = tl.split(left)
    is_own = (pair[:, None] == pair[None, :])[:, :, None, None]
    below = tl.sum(tl.where(is_own, below, 0.0), axis=1)
    x = -tl.dot(second, tl.dot(below, first, input_precision="ieee"), input_precision="ieee")
    whole = tl.join(tl.join(first, x), tl.join(tl.zeros_like(x), second))
    return tl.reshape(tl.permute(whole, (0, 3, 1, 4, 2)), (PAIRS, 2 * SIZE, 2 * SIZE))


@triton.jit
def _inverse(a):
    """Inverse of I + a for a strictly lower triangular a: [CHUNK, CHUNK] fp32.

    No powers of a: where keys repeat they grow beyond what sums in fp32 hold.
    """
    inverses = _joined(a, _diagonal_inverses(a), CHUNK // (2 * _BLOCK), _BLOCK)
    return tl.reshape(_joined(a, inverses, 1, 2 * _BLOCK), (CHUNK, CHUNK))


@triton.jit
def _solve_kernel(
    chunks,  # [N, CHUNK_FIELDS]
    keys,  # [N, CHUNK, 2, HK, DK]
    gates,  # [N, 2, HV, CHUNK]
    inverses,  # [N, HV, CHUNK, CHUNK], written: (I + A)^-1
    weights,  # [N, HV, CHUNK, CHUNK], written: e_i / e_j (k_j q_i) for j <= i, else 0
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(chunks + chunk * CHUNK_FIELDS + CHUNK_ROWS) == 0:
        return
    index, key = tl.arange(0, CHUNK), tl.arange(0, tile_size(DK))[None, :]
    q_at = keys + ((chunk * CHUNK + index[:, None]) * 2 * HK + head // (HV // HK)) * DK + key
    gate_at = gates + (chunk * 2 * HV + head) * CHUNK + index
    log_decay, beta = tl.load(gate_at), tl.load(gate_at + HV * CHUNK)
    q = tl.load(q_at, key < DK, other=0.0)
    k = tl.load(q_at + HK * DK, key < DK, other=0.0)
    below, until = index[:, None] > index[None, :], index[:, None] >= index[None, :]
    # Above the diagonal the exponential could overflow.
    ratio = tl.exp(tl.where(until, log_decay[:, None] - log_decay[None, :], -float("inf")))
    at = (chunk * HV + head) * CHUNK * CHUNK + index[:, None] * CHUNK + index[None, :]
    q_k = tl.dot(q, k.T, input_precision="ieee") * ratio
    tl.store(weights + at, q_k.to(weights.dtype.element_ty))
    k_k = tl.dot(k, k.T, input_precision="ieee") * ratio
    inverse = _inverse(tl.where(below, beta[:, None] * k_k, 0.0))
    tl.store(inverses + at, inverse.to(inverses.dtype.element_ty))


@triton.jit
def _run_chunk(state, q, k, v, inverse, weight, log_decay, log_last, beta):
    """The state after a chunk, and what its rows read."""
    decay, rounded = tl.exp(log_decay)[None, :], state.to(k.dtype)
    lacking = v.to(tl.float32) - decay * tl.dot(rounded, k.T, input_precision="ieee")
    lacking = (beta[None, :] * lacking).to(k.dtype)
    delta = tl.dot(lacking, inverse.T, input_precision="ieee")
    lasting = (delta * tl.exp(log_last - log_decay)[None, :]).to(k.dtype)
    state = tl.dot(lasting, k, state * tl.exp(log_last), input_precision="ieee")
    read = decay * tl.dot(rounded, q.T, input_precision="ieee")
    return state, tl.dot(delta.to(k.dtype), weight.T, read, input_precision="ieee")


@triton.jit(do_not_specialize=["first_run"])
def _scan_kernel(
    keys,  # [N, CHUNK, 2, HK, DK]
    values,  # [N, HV, DV, CHUNK]
    gates,  # [N, 2, HV, CHUNK]
    inverses,  # [N, HV, CHUNK, CHUNK]
    weights,  # [N, HV, CHUNK, CHUNK]
    runs,  # [B, FIELDS]
    first_chunks,  # [R]
    qkv,  # [T, C], rows qkv_stride apart
    states,  # [S, HV, DK, DV], written
    history,  # [S, K - 1, C], written
    out,  # [T, HV * DV], written
    qkv_stride,
    first_run,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """States and sums are transposed, [columns, keys] and [columns, rows].

    So each product's left operand is the one before it, and stays in registers.
    """
    TILES: tl.constexpr = triton.cdiv(DV, COLUMNS)
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    chunk, facts = run_to_scan(runs, first_chunks, first_run)
    slot, first, num_rows, begun, bad_rows = facts
    index, key = tl.arange(0, CHUNK), tl.arange(0, tile_size(DK))[None, :]
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < DK, column < DV
    inside = is_column[:, None] & is_key
    state_at = states + (slot * HV + head) * DK * DV + key * DV + column[:, None]
    state = tl.load(state_at, inside & begun, other=0.0)
    # Of the run's first chunk.
    keys += (chunk * CHUNK * 2 * HK + head // (HV // HK)) * DK
    values += (chunk * HV + head) * DV * CHUNK
    gates += (chunk * 2 * HV + head) * CHUNK
    inverses += (chunk * HV + head) * CHUNK * CHUNK
    weights += (chunk * HV + head) * CHUNK * CHUNK
    out += first * HV * DV + head * DV + column[None, :]
    q_at, v_at = index[:, None] * (2 * HK * DK) + key, column[:, None] * CHUNK + index[None, :]
    square = index[:, None] * CHUNK + index[None, :]
    for i in tl.range(tl.cdiv(num_rows, CHUNK), num_stages=STAGES):
        row = index + i * CHUNK
        k = tl.load(keys + i * (CHUNK * 2 * HK * DK) + HK * DK + q_at, is_key, other=0.0)
        inverse = tl.load(inverses + i * (HV * CHUNK * CHUNK) + square)
        v = tl.load(values + i * (HV * DV * CHUNK) + v_at, is_column[:, None], other=0.0)
        q = tl.load(keys + i * (CHUNK * 2 * HK * DK) + q_at, is_key, other=0.0)
        weight = tl.load(weights + i * (HV * CHUNK * CHUNK) + square)
        gate_at = gates + i * (2 * HV * CHUNK) + index
        log_decay, beta = tl.load(gate_at), tl.load(gate_at + HV * CHUNK)
        log_last = tl.load(gates + i * (2 * HV * CHUNK) + CHUNK - 1)
        state, read = _run_chunk(state, q, k, v, inverse, weight, log_decay, log_last, beta)
        exists = (row < num_rows)[:, None] & is_column[None, :]
        tl.store(out + row[:, None] * (HV * DV), read.T.to(out.dtype.element_ty), exists)

    tl.store(state_at, state, inside & (num_rows > 0))
    if (K > 1) & (num_rows > 0):
        keep_history(qkv, qkv_stride, history, facts, 2 * HK * DK + HV * DV, K - 1)
    fill_broken(out, HV * DV, bad_rows, is_column[None, :])


def advance_chunks(
    fast: FastRuns,
    params: GatedDeltaParams,
    raw: RawRows,
    memory: LayerMemory,
    out: Tensor,
) -> None:
    """Convolution and gated delta rule of the fast runs of a pass in one layer.

    Args:
        fast: the runs; those that do not follow their slot's rows give NaN.
        params: the layer's weights.
        raw: the pass's rows, in the dtype of ``memory``.
        memory: of which states and history are written.
        out: [T, Hv * Dv], of which the fast rows are written.
    """
    rule, count = params.rule, fast.num_chunks
    heads, num_values = rule.num_value_heads, rule.value_dim
    sizes = rule.constants
    new = raw.mixed.new_empty
    keys = new(count, FAST_ROWS, 2, rule.num_key_heads, rule.key_dim)
    values = new(count, heads, num_values, FAST_ROWS)
    inverses, weights = (new(count, heads, FAST_ROWS, FAST_ROWS) for _ in range(2))
    gates = memory.states.new_empty(count, 2, heads, FAST_ROWS)
    _prepare_kernel[(count * PARTS.value, 2 * rule.num_key_heads + heads + 1)](
        raw.mixed,
        *raw.gates,
        memory.history,
        params.A_log,
        params.dt_bias,
        params.conv_weight,
        params.conv_bias,
        fast.chunks,
        keys,
        values,
        gates,
        *raw.strides,
        **sizes,
        num_warps=8,
        **FUSED,
    )
    _solve_kernel[(count, heads)](
        fast.chunks,
        keys,
        gates,
        inverses,
        weights,
        **{name: sizes[name] for name in ("HK", "HV", "DK")},
        num_warps=4,
        **FUSED,
    )
    width, columns = tile_size(rule.key_dim), min(_COLUMNS, tile_size(num_values))
    # Of what ``_scan`` reads of a chunk: two are in flight beside the one that products read.
    held = FAST_ROWS * (2 * width + columns + 2 * FAST_ROWS) * raw.mixed.itemsize
    fits = width * raw.mixed.itemsize <= 256 and 2 * held <= shared_memory(out)
    _scan_kernel[(heads * triton.cdiv(num_values, columns), fast.num_runs)](
        keys,
        values,
        gates,
        inverses,
        weights,
        fast.runs,
        fast.first_chunks,
        raw.mixed,
        memory.states,
        memory.history,
        out,
        raw.strides[0],
        fast.first_run,
        **sizes,
        COLUMNS=columns,
        STAGES=3 if fits else 1,
        num_warps=4,
        **FUSED,
    )

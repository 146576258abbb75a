"""The walk of long runs on Hopper, in Gluon: the sums of ``triton``'s walk, in the same order.

A row begins with sums over its keys, so these are what a row needs first.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from sametoken.ops.model.recurrent.hopper_kernels import (
    GROUP,
    SLOTS,
    end_of,
    facts_of,
    fill_dead,
    new_ring,
    number,
    rows_of,
    store_row,
    walk_rows,
)
from sametoken.ops.model.recurrent.runs import FIELDS

#: Keys of a head. A column is summed in eight parts of 16, as in ``triton``.
KEYS = gl.constexpr(128)
#: Columns of a head's state that a program holds.
COLUMNS = gl.constexpr(32)
#: Threads that share a column: each sums a part, or two.
LANES = gl.constexpr(8)


@gluon.constexpr_function
def _state_layout(lanes):
    """[8 parts, 16 keys of a part, COLUMNS]; a thread's keys are in the order of their sum."""
    shared = lanes.bit_length() - 1
    keys = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]]
    parts = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    columns = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16]]
    own = shared - 2
    return gl.DistributedLinearLayout(
        keys + parts[shared:] + columns[:own],
        columns[own:3] + parts[:shared],
        columns[3:],
        [],
        [8, 16, 32],
    )


@gluon.constexpr_function
def _keys_layout(lanes):
    """[4, 8 parts, 4]: a row's keys as they lie in memory, where ``_state_layout`` needs them."""
    shared = lanes.bit_length() - 1
    parts = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        [[1, 0, 0], [2, 0, 0], [0, 0, 1], [0, 0, 2], *parts[shared:]],
        [[0, 0, 0]] * (5 - shared) + parts[:shared],
        [[0, 0, 0]] * 2,
        [],
        [4, 8, 4],
    )


STATE = gl.constexpr(_state_layout(LANES.value))
VALUES = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, STATE.value)))
ROW_KEYS = gl.constexpr(_keys_layout(LANES.value))


@gluon.jit
def _add_products(k_factor, k_total, q_factor, q_total, a, k, b, q):
    """Add products to two running sums factor * total, each with one rounding."""
    one = gl.to_tensor(1.0)
    return one, gl.fma(a, k, k_factor * k_total), one, gl.fma(b, q, q_factor * q_total)


@gluon.jit
def _add(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _along(state, k, q):
    """Sums over keys of state [8, 16, COLUMNS] times k and times q [8, 16, 1]: [COLUMNS] each.

    Both are one reduction, so that the sums of one fill the time that those of the other wait.
    """
    k, q = gl.broadcast(state, k)[1], gl.broadcast(state, q)[1]
    sums = gl.reduce((state, k, state, q), 1, _add_products)
    return gl.reduce((sums[0] * sums[1], sums[2] * sums[3]), 0, _add)


@gluon.jit
def _row_keys(memory):
    keys = gl.reshape(gl.permute(memory.load(ROW_KEYS), (1, 2, 0)), [8, 16])
    keys = gl.convert_layout(keys, gl.SliceLayout(2, STATE), assert_trivial=True)
    return gl.expand_dims(keys, 2)


@gluon.jit
def _load_ahead(rows, at):
    return _row_keys(rows[0].index(at))


@gluon.jit
def _walk_row(state, k, rows, at, last, out, shift, WIDTH: gl.constexpr):
    """One row, in the order of operations of ``triton``'s walk."""
    _, qs, vs, decays, betas, q_ks = rows
    q, v = _row_keys(qs.index(at)), vs.index(at).load(VALUES)
    decay, beta, q_k = number(decays.index(at)), number(betas.index(at)), number(q_ks.index(at))
    next_k = _load_ahead(rows, gl.minimum(at + 1, last))
    along_k, along_q = _along(state, k, q)
    delta = beta * gl.fma(-decay, along_k, v)
    store_row(out, at + shift, gl.fma(delta, q_k, decay * along_q), WIDTH)
    return gl.fma(k, delta[None, None, :], decay * state), next_k


@gluon.jit
def _store_state(at, state):
    gl.store(at, state)


@gluon.jit(do_not_specialize=["max_pending", "first_run", "end_run"])
def walk_kernel(
    prepared,  # [T + B * P, WIDTH]
    runs,  # [B, FIELDS]
    states,  # [S, HV, KEYS, DV], written
    out,  # [T, HV * DV], written
    max_pending,
    first_run,
    end_run,
    HK: gl.constexpr,
    HV: gl.constexpr,
    DV: gl.constexpr,
    PDL: gl.constexpr,
):
    """Some runs' rows over COLUMNS columns of a head's state.

    Program ids: the columns; the first run, which others follow at the distance of their number.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    WIDTH: gl.constexpr = 2 * HK * KEYS + HV * DV + 2 * HV + HK
    TILES: gl.constexpr = DV // COLUMNS
    head, first_column = gl.program_id(0) // TILES, gl.program_id(0) % TILES * COLUMNS
    key_head = head // (HV // HK)
    q_at, gate_at = key_head * KEYS, 2 * HK * KEYS + HV * DV
    v_at, q_k_at = 2 * HK * KEYS + head * DV + first_column, gate_at + 2 * HV + key_head
    columns = (q_at + HK * KEYS, q_at, v_at, gate_at + head, gate_at + HV + head, q_k_at)
    ks, qs, vs = new_ring(KEYS), new_ring(KEYS), new_ring(COLUMNS)
    decays, betas, q_ks = new_ring(1), new_ring(1), new_ring(1)
    BOX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    k_rows = ks._reinterpret(gl.float32, [SLOTS * GROUP, 4, 8, 4], BOX)
    q_rows = qs._reinterpret(gl.float32, [SLOTS * GROUP, 4, 8, 4], BOX)
    rings = (ks, qs, vs, decays, betas, q_ks)
    rows = (k_rows, q_rows, rows_of(vs), rows_of(decays), rows_of(betas), rows_of(q_ks))
    part = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, STATE)))[:, None]
    held = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, STATE)))[None, :]
    key = ((held % 4 * 8 + part) * 4 + held // 4)[:, :, None]
    value = first_column + gl.arange(0, COLUMNS, layout=VALUES)
    if PDL:
        cuda.gdc_wait()
    end_run = end_of(runs, first_run, end_run)
    for run in range(first_run + gl.program_id(1), end_run, gl.num_programs(1)):
        field = runs + run * FIELDS
        slot, first_row, num_rows, exists, ends = facts_of(field)
        row_out = out + (first_row * HV + head) * DV + value
        if num_rows > 0:
            state_at = states + (slot * HV + head) * KEYS * DV + key * DV + value[None, None, :]
            state = gl.load(state_at, mask=exists, other=0.0, cache_modifier=".cg")
            walk_rows(
                state, rings, rows, prepared + (first_row + run * max_pending) * WIDTH, columns,
                ends, state_at, row_out,
                _load_ahead, _walk_row, _store_state, WIDTH, HV * DV,
            )  # fmt: skip
        fill_dead(field, first_row, num_rows, row_out, HV * DV)

"""The walk of long runs on Hopper, in Gluon: the sums of ``triton``'s walk, in the same order.

A long run is a chain from row to row, so what counts is how soon a row ends. Groups of prepared
rows are copied into shared memory while earlier ones are walked, and four warps, each with eight
columns of a head's state, walk a group without a barrier. A row begins with sums over its keys, so
they are loaded while the row before it is walked.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra import cuda

from sametoken.ops.model.recurrent.runs import (
    BROKEN,
    EMPTY,
    FIELDS,
    FIRST_ROW,
    NUM_FOLDED,
    NUM_LASTING,
    NUM_ROWS,
    SLOT,
    STOP_ROW,
)

#: Keys of a head. A column is summed in eight parts of 16, as in ``triton``.
KEYS = gl.constexpr(128)
#: Columns of a head's state that a program holds, and its warps.
COLUMNS = gl.constexpr(32)
WARPS = gl.constexpr(4)
#: Rows of a group, groups in shared memory, and rows that the compiler may interleave: sixteen do
#: not stay in the instruction cache.
GROUP = gl.constexpr(32)
SLOTS = gl.constexpr(3)
UNROLLED = gl.constexpr(8)
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
#: One number, in all threads.
ONE = gl.constexpr(gl.DistributedLinearLayout([], [[0]] * 5, [[0]] * 2, [], [1]))


@gluon.jit
def _copy_columns(memory, prepared, first, end, WIDTH: gl.constexpr):
    """Begin to copy a group's rows from ``first`` on, without those from ``end`` on."""
    COUNT: gl.constexpr = memory.shape[1]
    EACH: gl.constexpr = min(COUNT, 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, EACH], [32 * EACH // max(COUNT, EACH), COUNT // EACH], [WARPS, 1], [1, 0]
    )
    row = first + gl.arange(0, GROUP, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = prepared + row * WIDTH + column
    async_copy.async_copy_global_to_shared(memory, at, mask=(row < end) & (column < COUNT))


@gluon.jit
def _copy_group(
    ring, slot, prepared, first, end, head, first_value,
    HK: gl.constexpr, HV: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    ks, qs, vs, decays, betas, q_ks = ring
    WIDTH: gl.constexpr = 2 * HK * KEYS + HV * DV + 2 * HV + HK
    key_head, gate = head // (HV // HK), prepared + (2 * HK * KEYS + HV * DV)
    _copy_columns(qs.index(slot), prepared + key_head * KEYS, first, end, WIDTH)
    _copy_columns(ks.index(slot), prepared + (HK + key_head) * KEYS, first, end, WIDTH)
    _copy_columns(vs.index(slot), prepared + 2 * HK * KEYS + first_value, first, end, WIDTH)
    _copy_columns(decays.index(slot), gate + head, first, end, WIDTH)
    _copy_columns(betas.index(slot), gate + HV + head, first, end, WIDTH)
    _copy_columns(q_ks.index(slot), gate + 2 * HV + key_head, first, end, WIDTH)
    async_copy.commit_group()


@gluon.jit
def _add_products(k_factor, k_total, q_factor, q_total, a, k, b, q):
    """Add products to two running sums factor * total, each with one rounding."""
    return 1.0, gl.fma(a, k, k_factor * k_total), 1.0, gl.fma(b, q, q_factor * q_total)


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
def _number(memory):
    return gl.sum(memory.load(ONE), axis=0)


@gluon.jit
def _walk_row(state, k, rows, at, last, out, shift, WIDTH: gl.constexpr):
    """One row, in the order of operations of ``triton``'s walk.

    It is at ``at`` in shared memory, and row ``at + shift`` of the output if that is not negative:
    folded rows have none. Returns the next state, and k of the next row up to ``last``.
    """
    ks, qs, vs, decays, betas, q_ks = rows
    q, v = _row_keys(qs.index(at)), vs.index(at).load(VALUES)
    decay, beta = _number(decays.index(at)), _number(betas.index(at))
    q_k, next_k = _number(q_ks.index(at)), _row_keys(ks.index(gl.minimum(at + 1, last)))
    along_k, along_q = _along(state, k, q)
    delta = beta * gl.fma(-decay, along_k, v)
    read = gl.fma(delta, q_k, decay * along_q)
    new = at + shift
    gl.store(out + new * WIDTH, read.to(out.dtype.element_ty), mask=new >= 0)
    return gl.fma(k, delta[None, None, :], decay * state), next_k


@gluon.jit
def _walk_run(
    state, rows, ring, prepared, num_folded, num_lasting, total, state_at, out, head, first_value,
    HK: gl.constexpr, HV: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Walk folded and new rows; the state is stored after the rows that last."""
    begin = 0
    for piece in range(2):
        end = num_lasting if piece == 0 else total
        for slot in gl.static_range(SLOTS - 1):
            first = begin + slot * GROUP
            _copy_group(ring, slot, prepared, first, end, head, first_value, HK, HV, DV)
        slot = 0
        for first in range(begin, end, GROUP):
            async_copy.wait_group(SLOTS - 2)
            gl.thread_barrier()
            at, rest = slot * GROUP, min(GROUP, end - first)
            k, last, shift = _row_keys(rows[0].index(at)), at + rest - 1, first - num_folded - at
            uneven = at + rest // UNROLLED * UNROLLED
            for row in range(at, uneven, UNROLLED):
                for i in gl.static_range(UNROLLED):
                    state, k = _walk_row(state, k, rows, row + i, last, out, shift, HV * DV)
            for row in range(uneven, last + 1):
                state, k = _walk_row(state, k, rows, row, last, out, shift, HV * DV)
            # All warps have left the slot before: they met above.
            later, free = first + (SLOTS - 1) * GROUP, (slot + SLOTS - 1) % SLOTS
            _copy_group(ring, free, prepared, later, end, head, first_value, HK, HV, DV)
            slot = (slot + 1) % SLOTS
        async_copy.wait_group(0)
        gl.thread_barrier()
        if (piece == 0) & (num_lasting > 0):
            gl.store(state_at, state)
        begin = end


@gluon.jit
def _end_of(runs, first, end):
    """The run after the last that has rows: padding comes last."""
    RUNS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    last = first
    for begin in range(first, end, 128):
        run = begin + gl.arange(0, 128, layout=RUNS)
        begins = gl.load(runs + run * FIELDS + FIRST_ROW, mask=run < end, other=0)
        stops = gl.load(runs + run * FIELDS + STOP_ROW, mask=run < end, other=0)
        last = gl.maximum(last, gl.max(gl.where(stops > begins, run + 1, first), 0))
    return last


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
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BOX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ks = gl.allocate_shared_memory(gl.float32, [SLOTS, GROUP, KEYS], PLAIN)
    qs = gl.allocate_shared_memory(gl.float32, [SLOTS, GROUP, KEYS], PLAIN)
    vs = gl.allocate_shared_memory(gl.float32, [SLOTS, GROUP, COLUMNS], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [SLOTS, GROUP, 1], PLAIN)
    betas = gl.allocate_shared_memory(gl.float32, [SLOTS, GROUP, 1], PLAIN)
    q_ks = gl.allocate_shared_memory(gl.float32, [SLOTS, GROUP, 1], PLAIN)
    ring = (ks, qs, vs, decays, betas, q_ks)
    rows = (
        ks._reinterpret(gl.float32, [SLOTS * GROUP, 4, 8, 4], BOX),
        qs._reinterpret(gl.float32, [SLOTS * GROUP, 4, 8, 4], BOX),
        vs._reinterpret(gl.float32, [SLOTS * GROUP, COLUMNS], LINE),
        decays._reinterpret(gl.float32, [SLOTS * GROUP, 1], LINE),
        betas._reinterpret(gl.float32, [SLOTS * GROUP, 1], LINE),
        q_ks._reinterpret(gl.float32, [SLOTS * GROUP, 1], LINE),
    )
    part = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, STATE)))[:, None]
    held = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, STATE)))[None, :]
    key = ((held % 4 * 8 + part) * 4 + held // 4)[:, :, None]
    value = first_column + gl.arange(0, COLUMNS, layout=VALUES)
    if PDL:
        cuda.gdc_wait()
    end_run = _end_of(runs, first_run, end_run)
    for run in range(first_run + gl.program_id(1), end_run, gl.num_programs(1)):
        field = runs + run * FIELDS
        first_row, num_rows = gl.load(field + FIRST_ROW), gl.load(field + NUM_ROWS).to(gl.int32)
        num_folded = gl.load(field + NUM_FOLDED).to(gl.int32)
        num_lasting = gl.load(field + NUM_LASTING).to(gl.int32)
        row_out = out + (first_row * HV + head) * DV + value
        if num_rows > 0:
            state_at = states + (gl.load(field + SLOT) * HV + head) * KEYS * DV
            state_at += key * DV + value[None, None, :]
            exists = gl.load(field + EMPTY) == 0
            state = gl.load(state_at, mask=exists, other=0.0, cache_modifier=".cg")
            _walk_run(
                state, rows, ring, prepared + (first_row + run * max_pending) * WIDTH,
                num_folded, num_lasting, num_folded + num_rows, state_at, row_out,
                head, head * DV + first_column, HK, HV, DV,
            )  # fmt: skip
        # Dead rows are zero; all rows of a broken run NaN.
        dead = gl.where(gl.load(field + BROKEN) != 0, float("nan"), 0.0)
        fill = gl.full([COLUMNS], 0.0, gl.float32, VALUES) + dead
        for row in range(num_rows, (gl.load(field + STOP_ROW) - first_row).to(gl.int32)):
            gl.store(row_out + row * HV * DV, fill.to(out.dtype.element_ty))

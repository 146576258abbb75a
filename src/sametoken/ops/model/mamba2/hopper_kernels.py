"""The walk of long runs on Hopper, in Gluon: the sums of ``triton``'s walk, in the same order."""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from sametoken.ops.model.recurrent.hopper_kernels import (
    GROUP,
    PLAIN,
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

#: Columns of a state, in four parts of eight threads' four columns, as in ``triton``.
COLUMNS = gl.constexpr(128)
PARTS = gl.constexpr(4)
LANES = gl.constexpr(8)
TOGETHER = gl.constexpr(4)
#: Rows of a head's state that a program holds.
ROWS = gl.constexpr(32)

#: [LANES, ROWS, TOGETHER], a part of the columns.
STATE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0]],
        [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[0, 8, 0], [0, 16, 0]],
        [],
        [8, 32, 4],
    )
)
ELEMENTS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, STATE.value)))
#: [LANES, TOGETHER]: a part of a row's B or C.
ALONG = gl.constexpr(gl.SliceLayout(1, STATE.value))


@gluon.jit
def _along(memory, at):
    """A row's B or C: [LANES, 1, TOGETHER] for each part."""
    parts = ()
    for part in gl.static_range(PARTS):
        held = memory.index(at * PARTS + part).load(ALONG)
        parts += (gl.expand_dims(held, 1),)
    return parts


@gluon.jit
def _load_ahead(rows, at):
    """What a row changes the state by: step * x, decay and B."""
    xs, bs, _, decays, steps, _ = rows
    change = number(steps.index(at)) * xs.index(at).load(ELEMENTS)
    return change, number(decays.index(at)), _along(bs, at)


@gluon.jit
def _walk_row(state, ahead, rows, at, last, out, shift, WIDTH: gl.constexpr):
    """One row, in the order of operations of ``triton``'s walk."""
    change, decay, b = ahead
    xs, _, cs, _, _, factor = rows
    x, c = xs.index(at).load(ELEMENTS), _along(cs, at)
    ahead = _load_ahead(rows, gl.minimum(at + 1, last))
    updated, total = (), gl.full([LANES, ROWS, TOGETHER], 0.0, gl.float32, STATE)
    by_element = gl.expand_dims(gl.expand_dims(change, 0), 2)
    for part in gl.static_range(PARTS):
        along_b, _ = gl.broadcast(b[part], state[part])
        factors, _ = gl.broadcast(by_element, state[part])
        one = gl.fma(factors, along_b, decay * state[part])
        along_c, _ = gl.broadcast(c[part], one)
        total = gl.fma(one, along_c, total)
        updated += (one,)
    store_row(out, at + shift, gl.fma(factor, x, gl.sum(gl.sum(total, 2), 0)), WIDTH)
    return updated, ahead


@gluon.jit
def _store_state(at, state):
    for part in gl.static_range(PARTS):
        gl.store(at + part * LANES * TOGETHER, state[part])


@gluon.jit(do_not_specialize=["max_pending", "first_run", "end_run"])
def walk_kernel(
    prepared,  # [T + B * P + 1, WIDTH]
    runs,  # [B, FIELDS]
    skip,  # [H]
    states,  # [S, H, P, COLUMNS], written
    out,  # [T, H * P], written
    max_pending,
    first_run,
    end_run,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    PDL: gl.constexpr,
):
    """Some runs' rows over ROWS rows of a head's state.

    Program ids: the rows of states; the first run, which others follow at the distance of their
    number.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    C: gl.constexpr = H * P + 2 * G * COLUMNS
    WIDTH: gl.constexpr = C + 2 * H
    TILES: gl.constexpr = P // ROWS
    head, first_element = gl.program_id(0) // TILES, gl.program_id(0) % TILES * ROWS
    group = head // (H // G)
    b_at = H * P + group * COLUMNS
    columns = (head * P + first_element, b_at, b_at + G * COLUMNS, C + head, C + H + head)
    rings = (new_ring(ROWS), new_ring(COLUMNS), new_ring(COLUMNS), new_ring(1), new_ring(1))
    xs, bs, cs, decays, steps = rings
    PARTS_OF_ROWS: gl.constexpr = [SLOTS * GROUP * PARTS, LANES, TOGETHER]
    b_rows = bs._reinterpret(gl.float32, PARTS_OF_ROWS, PLAIN)
    c_rows = cs._reinterpret(gl.float32, PARTS_OF_ROWS, PLAIN)
    factor = gl.load(skip + head).to(gl.float32)
    rows = (rows_of(xs), b_rows, c_rows, rows_of(decays), rows_of(steps), factor)
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, STATE)))[:, None, None]
    own = gl.arange(0, TOGETHER, layout=gl.SliceLayout(0, gl.SliceLayout(1, STATE)))[None, None, :]
    element = first_element + gl.arange(0, ROWS, layout=ELEMENTS)
    place = gl.expand_dims(gl.expand_dims(element, 0), 2) * COLUMNS + lane * TOGETHER + own
    if PDL:
        cuda.gdc_wait()
    end_run = end_of(runs, first_run, end_run)
    for run in range(first_run + gl.program_id(1), end_run, gl.num_programs(1)):
        field = runs + run * FIELDS
        slot, first_row, num_rows, exists, ends = facts_of(field)
        row_out = out + (first_row * H + head) * P + element
        if num_rows > 0:
            state_at = states + (slot * H + head) * P * COLUMNS + place
            state = ()
            for part in gl.static_range(PARTS):
                at = state_at + part * LANES * TOGETHER
                state += (gl.load(at, mask=exists, other=0.0, cache_modifier=".cg"),)
            walk_rows(
                state, rings, rows, prepared + (first_row + run * max_pending) * WIDTH, columns,
                ends, state_at, row_out,
                _load_ahead, _walk_row, _store_state, WIDTH, H * P,
            )  # fmt: skip
        fill_dead(field, first_row, num_rows, row_out, H * P)

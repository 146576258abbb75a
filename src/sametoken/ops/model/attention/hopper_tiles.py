"""Query tiles over KV tiles on Hopper, in Gluon: the arithmetic of both launch forms.

Queries are the 64 rows of a warp group's products (wgmma), or few of them the columns
(``hopper_columns``): adjacent rows of a run times the query heads of one KV head. A row's splits
follow ``schedule``. Within a split, KV tiles run in order through an online softmax, weights are
summed in registers, whose layout is fixed, and a split's result joins those before it by
``joined``. A KV tile or a split that a row cannot see leaves the row unchanged to the bit, so
neither the other rows of a query tile nor the splits that a program computes affect a row
(tests/gpu/test_attention_gpu.py).

Values in KV memory are finite (``rope_and_cache``), so weight 0 hides them.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import load_box, products, swizzled
from sametoken.ops.model.attention.arithmetic import scaled
from sametoken.ops.model.attention.hopper_sums import (
    LOWEST,
    QUERIES,
    hidden,
    joined,
    keep,
    softmax,
    summed,
    with_sinks,
)
from sametoken.ops.model.attention.schedule import begin_of, own_part, split_of


@gluon.jit
def rows_of_run(run, starts, width):
    """The first row of a run and the row after its last."""
    if starts is None:
        begin = run * width
        end = begin + width
    else:
        begin = gl.load(starts + run).to(gl.int32)
        end = gl.load(starts + run + 1).to(gl.int32)
    return begin, end


@gluon.jit
def run_of(tile, starts, first_run, width, tiles_per_run, ROWS: gl.constexpr):
    """A query tile's run: its first row, the tile's first row, and the row after its last."""
    begin, end = rows_of_run(first_run + tile // tiles_per_run, starts, width)
    first = begin + tile % tiles_per_run * ROWS
    return begin, first, gl.minimum(first + ROWS, end)


@gluon.jit
def extent(position, num_rows, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """A query tile's first split, the KV tile after its last one, and its first KV tile.

    ``position`` is that of the tile's first row; rows of a run ascend by one. Dead rows at a run's
    end count too: they read KV and give nothing. A window may begin within a split.
    """
    begin = gl.maximum(position - WINDOW + 1, 0) if WINDOW else 0 * position
    return split_of(begin), (position + num_rows + TILE - 1) // TILE, begin // TILE


@gluon.jit
def last_seen_of(position, first, stop, table_stride, BLOCK_SIZE: gl.constexpr):
    """The last position that a query tile sees; dead rows may lie beyond what a table has."""
    return gl.minimum(position + stop - first, table_stride * BLOCK_SIZE) - 1


@gluon.jit
def own_tiles(low, high, first, begin, end, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Of a query tile over KV tiles ``begin .. end - 1``, the splits in ``low .. high - 1``: the
    first of them, the one after their last, the one after the query tile's last (``own_part``), and
    their first KV tile and the one after their last.
    """
    split, last, after = own_part(low, high, first, end, TILE)
    if WINDOW:
        # Of a split that the window cuts, the middle may lie before the window.
        split = gl.where(low <= begin, first, split)
    kv = gl.maximum(begin_of(split) // TILE, begin) if WINDOW else begin_of(split) // TILE
    return split, last, after, kv, gl.minimum(begin_of(last) // TILE, end)


@gluon.jit
def _rows_of_boxes(
    table, last_seen, tile, head, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Where the boxes of a KV tile begin in memory.

    What follows the box of position ``last_seen`` is that box again: what a slot's table has there
    is a finished request's.
    """
    rows = ()
    for box in gl.static_range(TILE // BOX):
        at = gl.minimum(tile * TILE + box * BOX, last_seen // BOX * BOX)
        block = gl.load(table + at // BLOCK_SIZE).to(gl.int32)
        rows += ((block * KV_HEADS + head) * BLOCK_SIZE + at % BLOCK_SIZE,)
    return rows


@gluon.jit
def _load_kv(
    memory, barrier, ring, slot, rows, TILE: gl.constexpr, BLOCK_DIM: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Load one KV tile, in boxes of BOX positions x 64 elements of one block.

    Float8 lands in the upper half of its slot.
    """
    BOXES: gl.constexpr = TILE // BOX
    PARTS: gl.constexpr = BLOCK_DIM // 64
    mbarrier.expect(barrier, TILE * BLOCK_DIM * (memory.dtype.primitive_bitwidth // 8))
    if memory.dtype != ring.dtype:
        NARROW: gl.constexpr = swizzled(memory.dtype, 2, 64)
        ring = ring._reinterpret(memory.dtype, [2 * ring.shape[0], BOX, 64], NARROW)
        slot = 2 * slot + 1
    for box in gl.static_range(BOXES):
        for part in gl.static_range(PARTS):
            place = slot * (BOXES * PARTS) + part * BOXES + box
            load_box(memory, [rows[box], part * 64], barrier, ring.index(place))


@gluon.jit
def load_tiles(
    keys, values, table, last_seen, final, head, begin, end, count, ring, full, free,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, BLOCK_DIM: gl.constexpr,
    SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load KV tiles ``begin .. end - 1`` in turn, keys before values; returns tiles loaded so far.

    Tiles below position ``final``, the run's first, were written by earlier passes: only the others
    wait for the kernel before (``hopper.reads_earlier_passes``).
    """
    BOX: gl.constexpr = keys.block_shape[0]
    for tile in range(begin, end):
        rows = _rows_of_boxes(table, last_seen, tile, head, KV_HEADS, BLOCK_SIZE, TILE, BOX)
        if PDL and (tile + 1) * TILE > final:
            cuda.gdc_wait()
        for which in gl.static_range(2):
            use = 2 * count + which
            slot = use % SLOTS
            mbarrier.wait(free.index(slot), ((use // SLOTS) & 1) ^ 1)
            _load_kv(
                keys if which == 0 else values, full.index(slot), ring, slot, rows,
                TILE, BLOCK_DIM, BOX,
            )  # fmt: skip
        count += 1
    return count


@gluon.jit
def load_queries(
    q, memory, first, num_rows, head, HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr,
):  # fmt: skip
    """Load a query tile into shared memory; 0 where it has no row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_DIM, BLOCK_DIM // 8], [4, 1], [1, 0]
    )
    query = gl.arange(0, memory.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, BLOCK_DIM, layout=gl.SliceLayout(0, LAYOUT))
    at = (query // GROUP * HEADS + head * GROUP + query % GROUP) * HEAD_DIM
    mask = (query // GROUP < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    base = q + first.to(gl.int64) * (HEADS * HEAD_DIM)
    memory.store(gl.load(base + at[:, None] + dim[None, :], mask=mask, other=0.0))
    fence_async_shared()


@gluon.jit
def multiply_keys(q_memory, tiles, full, use, KV_LEFT: gl.constexpr):
    """Begin the products of queries and keys, once the keys are there."""
    SLOTS: gl.constexpr = tiles.shape[0]
    mbarrier.wait(full.index(use % SLOTS), (use // SLOTS) & 1)
    keys = tiles.index(use % SLOTS)
    left, right = (keys, q_memory) if KV_LEFT else (q_memory, keys)
    SHAPE: gl.constexpr = [left.shape[0], right.shape[0]]
    no_scores = gl.zeros(SHAPE, gl.float32, products(SHAPE[1]))
    return warpgroup_mma(left, right.permute((1, 0)), no_scores, use_acc=False, is_async=True)


@gluon.jit
def add_values(weights, tiles, full, use, acc, KV_LEFT: gl.constexpr):
    """Begin to add values by weights, once the values are there.

    Weights are in registers, or with KV on the left in shared memory.
    """
    SLOTS: gl.constexpr = tiles.shape[0]
    mbarrier.wait(full.index(use % SLOTS), (use // SLOTS) & 1)
    values = tiles.index(use % SLOTS)
    if KV_LEFT:
        acc = warpgroup_mma(values.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(weights, values, acc, is_async=True)
    return acc


@gluon.jit
def _total_of(weights, KV_LEFT: gl.constexpr):
    """Total weights [queries], of columns added as of rows.

    There four threads have a query's positions, eight apart, two neighbours each.
    """
    if KV_LEFT:
        AS_ROWS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
        rows = gl.convert_layout(weights.permute((1, 0)), AS_ROWS)
        total = gl.convert_layout(gl.sum(rows, 1), gl.SliceLayout(0, weights.type.layout))
    else:
        total = gl.sum(weights, 1)
    return total


@gluon.jit
def weigh(scores, top, total, scale, KV_LEFT: gl.constexpr):
    """As ``softmax``, with the total weight before what shrinks sums."""
    weights, top, shrink = softmax(scores, top, scale, KV_LEFT)
    return weights, top, gl.fma(total, shrink, _total_of(weights, KV_LEFT)), shrink


@gluon.jit
def store_part(
    sums, stats, acc, top, total, num_rows, part, HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, most,
):  # fmt: skip
    """Store one split's result of a query tile, whose first line is ``part``."""
    SCORES: gl.constexpr = top.type.layout
    SUMS: gl.constexpr = acc.type.layout
    query = gl.arange(0, acc.shape[0], layout=SCORES)
    line = part + (query // GROUP * HEADS + query % GROUP) * most
    mask = query // GROUP < num_rows
    gl.store(stats + line * 2, total, mask=mask)
    gl.store(stats + line * 2 + 1, top, mask=mask)
    query = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, SUMS))
    dim = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, SUMS))
    line = part + (query // GROUP * HEADS + query % GROUP) * most
    mask = (query // GROUP < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    gl.store(sums + line[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)


@gluon.jit
def _store_outputs(
    out, slots, slot, sinks, v_scales, acc, top, total, query, first, num_rows, head, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Join sinks, and multiply with the values' scale, if there are any; store a tile's outputs.

    Dead rows are 0, so a MoE layer routes them all alike.
    """
    if sinks is not None:
        own = gl.load(sinks + head * GROUP + query % GROUP)
        acc, total = with_sinks(acc, top, total, own, scale)
    acc = acc / gl.where(total == 0.0, 1.0, total)[:, None]
    acc = scaled(acc, v_scales, head)
    present = query // GROUP < num_rows
    if RAGGED:
        live = gl.load(slots + first + query // GROUP, mask=present, other=0) == slot
        acc = gl.where(live[:, None], acc, 0.0)
    dim = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    at = (query // GROUP * HEADS + head * GROUP + query % GROUP) * HEAD_DIM
    base = out + first.to(gl.int64) * (HEADS * HEAD_DIM)
    mask = present[:, None] & (dim < HEAD_DIM)[None, :]
    gl.store(base + at[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def store_rows(
    out, slots, slot, sinks, v_scales, acc, top, total, first, num_rows, head, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Store the outputs of what ``attend`` returns."""
    BY_QUERY: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    query = gl.arange(0, acc.shape[0], layout=BY_QUERY)
    top, total = gl.convert_layout(top, BY_QUERY), gl.convert_layout(total, BY_QUERY)
    _store_outputs(
        out, slots, slot, sinks, v_scales, acc, top, total, query, first, num_rows, head, scale,
        HEADS, GROUP, HEAD_DIM, RAGGED,
    )  # fmt: skip


@gluon.jit
def uncut_tiles(position, num_rows, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """First and end of the KV tiles that every row of a query tile sees whole."""
    begin = (max(position + num_rows - WINDOW, 0) + TILE - 1) // TILE if WINDOW else 0 * position
    return begin, (position + 1) // TILE


@gluon.jit
def _end_split(
    kept, rest, sums, stats, acc, top, total, all_top, all_total, some, num_rows, part, split, most,
    scale, joins, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Join a split's result to ``kept``, or store it; maximum and total weight of all splits."""
    if kept is not None and joins:
        all_top, all_total, old, new = joined(all_top, all_total, top, total, scale)
        keep(kept, rest, summed(kept, rest, acc, old, new, some))
    else:
        store_part(
            sums, stats, acc, top, total, num_rows, part + split, HEADS, GROUP, HEAD_DIM, most
        )
    return all_top, all_total


@gluon.jit
def first_weights(
    q_memory, tiles, full, free, use, kv, seen, uncut, uncut_end, lowest, scale,
    WINDOW: gl.constexpr, KV_LEFT: gl.constexpr,
):  # fmt: skip
    """Weights, maximum and total weight of the first KV tile."""
    token = multiply_keys(q_memory, tiles, full, use, KV_LEFT)
    scores = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(free.index(use % tiles.shape[0]), count=1)
    scores = hidden(scores, kv, seen, uncut, uncut_end, WINDOW, KV_LEFT)
    weights, top, total, _ = weigh(scores, lowest, gl.zeros_like(lowest), scale, KV_LEFT)
    return weights, top, total


@gluon.jit
def last_values(weights, tiles, full, free, use, acc, KV_LEFT: gl.constexpr):
    """The weighted values of a split, its last KV tile's included."""
    token = add_values(weights, tiles, full, use, acc, KV_LEFT)
    acc = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(free.index(use % tiles.shape[0]), count=1)
    return acc


@gluon.jit
def attend(
    q_memory, ring, full, free, count, begin, end, position, num_rows, scale,
    kept, rest, sums, stats, part, most, joins, HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """64 queries over KV tiles ``begin .. end - 1``, from a split's border or a window's beginning.

    A tile's scores are multiplied while the weights of the tile before it are. Splits are joined
    in ``kept`` and ``rest`` if it ``joins``; else the results of all but the last are stored.
    Returns the weighted values, maximum and total weight of all splits joined, or of the last.
    """
    DTYPE: gl.constexpr = q_memory.dtype
    SUMS: gl.constexpr = products(BLOCK_DIM)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    tiles = ring._reinterpret(DTYPE, [SLOTS, TILE, BLOCK_DIM], swizzled(DTYPE))
    row = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, products(TILE))) // GROUP
    # Queries that are not there get weights of 0 by it: products of zeros draw less power.
    lowest = gl.where(row < num_rows, LOWEST, -LOWEST)
    seen = position + row
    # Dead rows count as rows that follow: what they see does not matter.
    uncut, uncut_end = uncut_tiles(position, num_rows, TILE, WINDOW)

    weights, top, total = first_weights(
        q_memory, tiles, full, free, 2 * count, begin, seen, uncut, uncut_end, lowest, scale,
        WINDOW, False,
    )  # fmt: skip
    weights = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
    acc = gl.zeros([QUERIES, BLOCK_DIM], gl.float32, SUMS)
    all_top, all_total = lowest, gl.zeros_like(lowest)
    split = split_of(begin * TILE)
    first_border = begin_of(split + 1) // TILE
    border = first_border
    for kv in range(begin + 1, end):
        use = 2 * (count + kv - begin)
        scores_token = multiply_keys(q_memory, tiles, full, use, False)
        acc_token = add_values(weights, tiles, full, use - 1, acc, False)
        scores = warpgroup_mma_wait(1, deps=(scores_token,))
        mbarrier.arrive(free.index(use % SLOTS), count=1)
        scores = hidden(scores, kv, seen, uncut, uncut_end, WINDOW, False)
        split_top, split_total = top, total
        if kv == border:
            top, total = lowest, gl.zeros_like(lowest)
        next_weights, top, total, shrink = weigh(scores, top, total, scale, False)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        mbarrier.arrive(free.index((use - 1) % SLOTS), count=1)
        if kv == border:
            all_top, all_total = _end_split(
                kept, rest, sums, stats, acc, split_top, split_total, all_top, all_total,
                kv > first_border, num_rows, part, split, most, scale, joins,
                HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip
            acc = gl.zeros([QUERIES, BLOCK_DIM], gl.float32, SUMS)
            split += 1
            border = begin_of(split + 1) // TILE
        else:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        weights = gl.convert_layout(next_weights.to(DTYPE), WEIGHTS)
    acc = last_values(weights, tiles, full, free, 2 * (count + end - begin) - 1, acc, False)
    if kept is not None and joins:
        top, total, old, new = joined(all_top, all_total, top, total, scale)
        acc = summed(kept, rest, acc, old, new, end > first_border)
    return acc, top, total


@gluon.jit
def join_parts(
    out, slots, slot, sinks, v_scales, sums, stats, first, num_rows, first_split, end_split, part,
    most, head, scale, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_DIM: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Join the stored results of a query tile's splits in order, and store its outputs.

    That of ``first_split`` has those of all splits before it.
    """
    AHEAD: gl.constexpr = 4
    LINES: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, BLOCK_DIM, layout=gl.SliceLayout(0, LAYOUT))
    for begin in range(0, num_rows * GROUP, LINES):
        query = begin + line
        present = query < num_rows * GROUP
        mask = present[:, None] & (dim < HEAD_DIM)[None, :]
        at = part + (query // GROUP * HEADS + query % GROUP) * most
        top = gl.full([LINES], LOWEST, gl.float32, gl.SliceLayout(1, LAYOUT))
        total = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, LAYOUT))
        acc = gl.zeros([LINES, BLOCK_DIM], gl.float32, LAYOUT)
        for split in range(first_split, end_split, AHEAD):
            parts, tops, totals = (), (), ()
            for ahead in gl.static_range(AHEAD):
                here = at + split + ahead
                exists = present & (split + ahead < end_split)
                tops += (
                    gl.load(stats + here * 2 + 1, mask=exists, other=LOWEST, cache_modifier=".cg"),
                )
                totals += (gl.load(stats + here * 2, mask=exists, other=0.0, cache_modifier=".cg"),)
                parts += (gl.load(
                    sums + here[:, None] * HEAD_DIM + dim[None, :], mask=mask & exists[:, None],
                    other=0.0, cache_modifier=".cg",
                ),)  # fmt: skip
            for ahead in gl.static_range(AHEAD):
                top, total, old, new = joined(top, total, tops[ahead], totals[ahead], scale)
                acc = gl.fma(acc, old[:, None] + gl.zeros_like(acc), parts[ahead] * new[:, None])
        _store_outputs(
            out, slots, slot, sinks, v_scales, acc, top, total, query, first, num_rows, head, scale,
            HEADS, GROUP, HEAD_DIM, RAGGED,
        )  # fmt: skip

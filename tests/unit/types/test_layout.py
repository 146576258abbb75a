"""Where rows lie: running sums, windows first, padding behind; shapes that hold others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.types.layout import (
    DRAFT_LIMIT,
    NO_PLACE,
    NO_REQUESTS,
    NUM_QUERY,
    PLACE,
    ROW_START,
    SAMPLES,
    SLOT,
    STEP_ID,
    TABLE_ROWS,
    WINDOW_START,
    StepLayout,
    StepShape,
    padded,
)
from sametoken.types.plan import ScheduledRequest, StepPlan

RESERVED = 99


def scheduled(*fields):
    return st.tuples(st.integers(0, 9), *fields).map(lambda drawn: ScheduledRequest(*drawn))


windows = scheduled(st.just(1), st.integers(0, 7), st.just(True))
long = scheduled(st.integers(2, 40), st.just(0), st.booleans())
inside = scheduled(st.just(1), st.just(0), st.just(False))
#: Windows, then chunks of which some sample.
plans = st.builds(
    lambda first, rest: StepPlan(7, requests=(*first, *rest)),
    st.lists(windows, max_size=4),
    st.lists(long | inside, max_size=3),
)


@given(plans)
def test_starts_are_running_sums_and_every_row_is_somebody_s(plan):
    layout = StepLayout.of(plan)
    assert (layout.row_starts[0], layout.window_starts[0]) == (0, 0)
    for row, (first, stop), (window, end) in zip(
        plan.requests, pairwise(layout.row_starts), pairwise(layout.window_starts), strict=True
    ):
        assert stop - first == row.num_query + row.draft_limit
        assert end - window == (row.draft_limit + 1 if row.samples else 0)
    sampled = [(slot, start) for slot, start, count in layout.windows() for _ in range(count)]
    assert len(sampled) == layout.shape.num_sampled
    assert [slot for slot, _, _ in layout.windows()] == [row.slot for row in plan.requests]


@given(plans)
def test_the_shape_counts_windows_and_the_longest(plan):
    shape = StepLayout.of(plan).shape
    first = [row for row in plan.requests if row.num_query == 1 and row.samples]
    assert [*plan.requests[: len(first)]] == first
    assert shape.num_requests == len(plan.requests)
    assert shape.num_windows == len(first)
    assert shape.num_rows == sum(row.num_query + row.draft_limit for row in plan.requests)
    assert shape.num_sampled == sum(row.draft_limit + 1 for row in plan.requests if row.samples)
    windows = (row.draft_limit + 1 for row in plan.requests if row.samples)
    assert shape.max_window == max(windows, default=0)
    sizes = [row.num_query + row.draft_limit for row in plan.requests]
    assert shape.max_rows == max(sizes, default=0)
    assert shape.all_sampled == (len(first) == len(plan.requests))
    assert not shape.all_sampled or shape.num_sampled == shape.num_rows


@given(plans, st.data())
def test_of_drafts_that_are_known_nobody_gets_more_rows_than_it_has(plan, data):
    counts = [data.draw(st.integers(0, 7)) for _ in plan.requests]
    layout = StepLayout.of(plan, counts)
    limits = [min(row.draft_limit, count) for row, count in zip(plan.requests, counts, strict=True)]
    assert [*layout.draft_limit] == limits
    assert StepLayout.of(plan).shape.holds(layout.shape)
    assert StepLayout.of(plan, [7] * len(counts)) == StepLayout.of(plan)


def column(table, index: int) -> list[int]:
    return [row[index] for row in table]


@given(plans, st.integers(0, 3), st.integers(0, 3), st.integers(0, 5))
def test_padding_stands_behind_the_windows_and_behind_the_chunks(plan, windows, chunks, first):
    layout, count = StepLayout.of(plan), len(plan.requests)
    exact = layout.shape
    shape = replace(
        exact, num_requests=count + windows + chunks, num_windows=exact.num_windows + windows
    )
    table = layout.table(shape, RESERVED, first)
    assert (len(table), {len(row) for row in table}) == (TABLE_ROWS, {shape.table_width})
    assert shape.table_width % 2 == 0
    assert shape.table_width > shape.num_requests
    places = [*range(exact.num_windows), *range(shape.num_windows, shape.num_windows + count)]
    for b, row in enumerate(plan.requests):
        own = column(table, places[b])
        asked = [own[i] for i in (SLOT, NUM_QUERY, DRAFT_LIMIT, SAMPLES)]
        assert asked == [row.slot, row.num_query, row.draft_limit, row.samples]
        assert (own[STEP_ID], own[PLACE]) == (7, first + b)
        starts = (own[ROW_START], own[WINDOW_START])
        assert starts == (layout.row_starts[b], layout.window_starts[b])
    for index in set(range(shape.table_width)) - {*places[:count]}:
        own = column(table, index)
        assert [own[i] for i in (SLOT, NUM_QUERY, DRAFT_LIMIT, SAMPLES)] == [RESERVED, 0, 0, 0]
        assert (own[STEP_ID], own[PLACE]) == (7, NO_PLACE)
    # Padding owns no row: the sums go on as they were.
    for starts, total in ((ROW_START, exact.num_rows), (WINDOW_START, exact.num_sampled)):
        assert table[starts] == sorted(table[starts])
        assert table[starts][shape.num_requests] == total
        for index in set(range(shape.num_requests)) - {*places[:count]}:
            assert table[starts][index] == table[starts][index + 1]


@given(plans, st.sampled_from([1, 4, 64]))
def test_a_padded_shape_holds_the_step_and_stays_of_its_kind(plan, multiple):
    shape = StepLayout.of(plan).shape
    wide = padded(shape, multiple)
    sizes = (wide.num_windows, wide.num_chunks, wide.num_rows, wide.num_sampled)
    assert all(size % multiple == 0 for size in sizes)
    assert wide.num_rows - shape.num_rows < multiple
    assert wide.all_sampled == shape.all_sampled
    assert not wide.all_sampled or wide.num_sampled == wide.num_rows
    assert wide.holds(shape)
    assert shape.holds(wide) == (wide == shape)
    assert padded(shape, 1) == shape


def test_a_layout_of_nobody_is_all_padding():
    shape = StepShape(3, 8, 4, 2, 4, 8)
    table = NO_REQUESTS.table(shape, RESERVED, 0)
    assert column(table, 0) == column(table, 3) == [RESERVED, 0, 0, 0, 0, NO_PLACE, 0, 0]
    assert shape.holds(NO_REQUESTS.shape)


WINDOWS = StepShape(4, 8, 8, 4, 4, 4)
MIXED = StepShape(6, 64, 10, 4, 4, 64)


@pytest.mark.parametrize(
    ("shape", "step", "fits"),
    [
        (WINDOWS, StepShape(3, 8, 8, 3, 4, 4), True),
        (WINDOWS, StepShape(3, 8, 8, 3, 5, 5), False),
        (WINDOWS, StepShape(5, 8, 8, 5, 2, 2), False),
        (WINDOWS, StepShape(3, 9, 9, 3, 4, 4), False),
        # A chunk has rows that are not sampled.
        (WINDOWS, StepShape(2, 5, 3, 1, 3, 3), False),
        (MIXED, StepShape(2, 5, 3, 1, 3, 3), True),
        (MIXED, StepShape(3, 8, 8, 3, 4, 4), True),
        (MIXED, StepShape(3, 8, 8, 3, 5, 5), False),
        (MIXED, StepShape(5, 8, 8, 5, 2, 2), False),
        (MIXED, StepShape(3, 20, 2, 0, 0, 9), False),
        (MIXED, StepShape(2, 40, 11, 1, 4, 36), False),
        (MIXED, StepShape(1, 65, 0, 0, 0, 65), False),
        # All states are wanted, and of windows all are there.
        (MIXED, StepShape(2, 5, 3, 1, 3, 3, True), False),
        (replace(MIXED, all_states=True), StepShape(2, 5, 3, 1, 3, 3, True), True),
        (replace(MIXED, all_states=True), StepShape(2, 5, 3, 1, 3, 3), True),
        (WINDOWS, StepShape(3, 8, 8, 3, 4, 4, True), True),
    ],
)
def test_what_a_captured_shape_holds(shape, step, fits):
    assert shape.holds(step) == fits

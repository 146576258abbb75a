"""Layout of a step's rows, computed on the host from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from sametoken.types.fast_prompts import ExpandedChunk, expanded_chunks
from sametoken.types.plan import StepPlan

#: Row indices of a layout's table.
SLOT, NUM_QUERY, DRAFT_LIMIT, SAMPLES, STEP_ID, PLACE, ROW_START, WINDOW_START = range(8)
TABLE_ROWS = 8

#: The place of a padding request, whose result is not copied to the host.
NO_PLACE = -1


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step's tensors: everything that a captured graph fixes.

    Attributes:
        num_requests: B, scheduled requests.
        num_rows: T, rows of the forward pass.
        num_sampled: L, rows whose logits are computed.
        num_windows: leading requests that are windows; the others are prompt chunks.
        max_window: rows of the longest window, of a prompt's end too.
        max_rows: rows of the longest request.
        all_states: whether the last layer's states of all rows are wanted, not only of the
            sampled ones.
        expanded: the last chunks, whose latents are expanded, which no captured graph holds.
    """

    num_requests: int
    num_rows: int
    num_sampled: int
    num_windows: int
    max_window: int
    max_rows: int
    all_states: bool = False
    expanded: tuple[ExpandedChunk, ...] = ()

    @property
    def all_sampled(self) -> bool:
        """Whether every row is sampled: the step has no chunk."""
        return self.num_windows == self.num_requests

    @property
    def num_chunks(self) -> int:
        """Requests that are prompt chunks."""
        return self.num_requests - self.num_windows

    def holds(self, other: StepShape) -> bool:
        """Whether a step of another shape can run in this one with padding."""
        return (
            other.num_windows <= self.num_windows
            and other.num_rows <= self.num_rows
            and other.num_chunks <= self.num_chunks
            and other.num_sampled <= self.num_sampled
            and other.max_window <= self.max_window
            and other.max_rows <= self.max_rows
            # Windows have no other rows.
            and other.all_states <= (self.all_states or self.all_sampled)
            and not other.expanded
        )

    @property
    def table_width(self) -> int:
        """Columns of the layout's table; even, so that each row is aligned."""
        return self.num_requests + 1 + (self.num_requests + 1) % 2


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Rows of a step: a pure function of its plan, or of its plan and the draft counts.

    Request b owns rows ``row_starts[b] .. row_starts[b + 1] - 1``: its committed tokens, then its
    drafts up to the limit. Its window, from the last committed token on, is sampled: sampled rows
    ``window_starts[b] .. window_starts[b + 1] - 1``. A request that does not sample owns no
    sampled row. The device decides which rows are live.

    Attributes:
        step_id: the plan's.
        slots, num_query, draft_limit, samples: by request; windows come first.
        row_starts, window_starts: exclusive prefix sums and the total, B + 1 entries each.
        all_states, expanded: as in ``StepShape``.
        num_wanted: as in ``StepPlan``; no captured graph reads it.
    """

    step_id: int
    slots: tuple[int, ...]
    num_query: tuple[int, ...]
    draft_limit: tuple[int, ...]
    samples: tuple[bool, ...]
    row_starts: tuple[int, ...]
    window_starts: tuple[int, ...]
    all_states: bool = False
    expanded: tuple[ExpandedChunk, ...] = ()
    num_wanted: int | None = None

    @classmethod
    def of(
        cls, plan: StepPlan, num_drafts: Sequence[int] | None = None, *, all_states: bool = False
    ) -> StepLayout:
        """The layout of a plan.

        Args:
            plan: the scheduled requests, windows before chunks.
            num_drafts: drafts of each request, if the host can read them; only these get rows.
            all_states: as in ``StepShape``.
        """
        limits = [scheduled.draft_limit for scheduled in plan.requests]
        if num_drafts is not None:
            limits = [min(pair) for pair in zip(limits, num_drafts, strict=True)]
        pairs = list(zip(plan.requests, limits, strict=True))
        sizes = [scheduled.num_query + limit for scheduled, limit in pairs]
        windows = [limit + 1 if scheduled.samples else 0 for scheduled, limit in pairs]
        row_starts = tuple(accumulate(sizes, initial=0))
        return cls(
            step_id=plan.step_id,
            slots=tuple(scheduled.slot for scheduled in plan.requests),
            num_query=tuple(scheduled.num_query for scheduled in plan.requests),
            draft_limit=tuple(limits),
            samples=tuple(scheduled.samples for scheduled in plan.requests),
            row_starts=row_starts,
            window_starts=tuple(accumulate(windows, initial=0)),
            all_states=all_states,
            expanded=expanded_chunks(plan, row_starts),
            num_wanted=plan.num_wanted,
        )

    @property
    def num_windows(self) -> int:
        """Requests whose rows are one window: one committed token, then drafts."""
        pairs = zip(self.num_query, self.samples, strict=True)
        return sum(query == 1 and samples for query, samples in pairs)

    @property
    def shape(self) -> StepShape:
        """The sizes without padding."""
        return StepShape(
            num_requests=len(self.slots),
            num_rows=self.row_starts[-1],
            num_sampled=self.window_starts[-1],
            num_windows=self.num_windows,
            max_window=_longest(self.window_starts),
            max_rows=_longest(self.row_starts),
            all_states=self.all_states,
            expanded=self.expanded,
        )

    def table(self, shape: StepShape, reserved_slot: int, first_place: int) -> list[list[int]]:
        """The table to upload: ``TABLE_ROWS`` rows of ``shape.table_width`` integers.

        Padding requests use the reserved slot and own no row. They follow the windows and the
        chunks, so that each kind starts where the shape expects it.

        Args:
            shape: the sizes, padding included.
            reserved_slot: the slot of padding requests.
            first_place: index of the step's first result in the host's result buffer.
        """
        count, windows = len(self.slots), self.num_windows
        between = shape.num_windows - windows
        behind = shape.table_width - count - between
        rows = [
            (self.slots, reserved_slot, reserved_slot),
            (self.num_query, 0, 0),
            (self.draft_limit, 0, 0),
            ([*map(int, self.samples)], 0, 0),
            ([self.step_id] * count, self.step_id, self.step_id),
            (range(first_place, first_place + count), NO_PLACE, NO_PLACE),
            (self.row_starts[:-1], self.row_starts[windows], self.row_starts[-1]),
            (self.window_starts[:-1], self.window_starts[windows], self.window_starts[-1]),
        ]
        return [
            [*values[:windows], *[inner] * between, *values[windows:], *[outer] * behind]
            for values, inner, outer in rows
        ]

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """Slot, first sampled row and number of sampled rows of each request."""
        for slot, (start, stop) in zip(self.slots, pairwise(self.window_starts), strict=True):
            yield slot, start, stop - start


def _longest(starts: Sequence[int]) -> int:
    """The greatest difference of running sums."""
    return max((stop - start for start, stop in pairwise(starts)), default=0)


def padded(shape: StepShape, multiple: int) -> StepShape:
    """The shape with sizes rounded up to multiples; one without chunks stays without chunks."""

    def up(size: int) -> int:
        return -(-size // multiple) * multiple

    windows, chunks, rows = up(shape.num_windows), up(shape.num_chunks), up(shape.num_rows)
    sampled = rows if shape.all_sampled else up(shape.num_sampled)
    return replace(
        shape,
        num_requests=windows + chunks,
        num_windows=windows,
        num_rows=rows,
        num_sampled=sampled,
    )


#: A layout without requests: padding fills every shape.
NO_REQUESTS = StepLayout(0, (), (), (), (), (0,), (0,))

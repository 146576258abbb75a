"""Where the rows of one step lie: what the host alone decides, from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sametoken.types.plan import StepPlan

#: What the rows of a layout's table hold.
SLOT, NUM_QUERY, DRAFT_LIMIT, SAMPLES, STEP_ID, PLACE, ROW_START, WINDOW_START = range(8)
TABLE_ROWS = 8

#: The place of padding: nobody waits for its result.
NO_PLACE = -1

_EVEN = 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step's tensors, all that a captured graph fixes.

    Attributes:
        num_requests: B, scheduled requests.
        num_rows: T, rows of the forward pass.
        num_sampled: L, rows whose logits are computed.
        num_windows: the first so many requests are windows; the others have chunks.
        max_window: the most rows that a window has.
        max_rows: the most rows that a request has.
    """

    num_requests: int
    num_rows: int
    num_sampled: int
    num_windows: int
    max_window: int
    max_rows: int

    @property
    def all_sampled(self) -> bool:
        """Whether every row is sampled: the step has windows alone."""
        return self.num_windows == self.num_requests

    @property
    def num_chunks(self) -> int:
        """Requests that are no windows."""
        return self.num_requests - self.num_windows

    def holds(self, other: StepShape) -> bool:
        """Whether a step of another shape can run in this one, padded."""
        rooms = (
            (other.num_windows, self.num_windows),
            (other.num_chunks, self.num_chunks),
            (other.num_rows, self.num_rows),
            (other.num_sampled, self.num_sampled),
            (other.max_window, self.max_window),
            (other.max_rows, self.max_rows),
        )
        return all(needed <= room for needed, room in rooms)

    @property
    def table_width(self) -> int:
        """Columns of the layout's table, even so that each of its rows is aligned."""
        return self.num_requests + 1 + (self.num_requests + 1) % _EVEN


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Rows of a step: a pure function of its plan, or of its plan and the drafts that exist.

    Request b owns rows ``row_starts[b] .. row_starts[b + 1] - 1``: its committed tokens, then as
    many drafts as it may have. Of these its window, from the last committed token on, is sampled:
    sampled rows ``window_starts[b] .. window_starts[b + 1] - 1``. A request that does not sample
    owns none. Which rows are live the device decides.

    Attributes:
        step_id: the plan's.
        slots, num_query, draft_limit, samples: by request; windows come first.
        row_starts, window_starts: running sums, B + 1 of each.
    """

    step_id: int
    slots: tuple[int, ...]
    num_query: tuple[int, ...]
    draft_limit: tuple[int, ...]
    samples: tuple[bool, ...]
    row_starts: tuple[int, ...]
    window_starts: tuple[int, ...]

    @classmethod
    def of(cls, plan: StepPlan, num_drafts: Sequence[int] | None = None) -> StepLayout:
        """The layout of a plan.

        Args:
            plan: what is scheduled; windows before chunks.
            num_drafts: drafts that each request has, where they can be read: rows are then laid
                out for these alone.
        """
        limits = [row.draft_limit for row in plan.requests]
        if num_drafts is not None:
            limits = [min(pair) for pair in zip(limits, num_drafts, strict=True)]
        sizes = [row.num_query + limit for row, limit in zip(plan.requests, limits, strict=True)]
        windows = [
            limit + 1 if row.samples else 0
            for row, limit in zip(plan.requests, limits, strict=True)
        ]
        return cls(
            step_id=plan.step_id,
            slots=tuple(row.slot for row in plan.requests),
            num_query=tuple(row.num_query for row in plan.requests),
            draft_limit=tuple(limits),
            samples=tuple(row.samples for row in plan.requests),
            row_starts=tuple(accumulate(sizes, initial=0)),
            window_starts=tuple(accumulate(windows, initial=0)),
        )

    @property
    def num_windows(self) -> int:
        """Requests whose rows are one window: one committed token, and drafts."""
        pairs = zip(self.num_query, self.samples, strict=True)
        return sum(query == 1 and samples for query, samples in pairs)

    @property
    def shape(self) -> StepShape:
        """The sizes without padding."""
        pairs = zip(self.row_starts, self.row_starts[1:], strict=False)
        sizes = [stop - start for start, stop in pairs]
        num_windows = self.num_windows
        return StepShape(
            num_requests=len(self.slots),
            num_rows=self.row_starts[-1],
            num_sampled=self.window_starts[-1],
            num_windows=num_windows,
            max_window=max(sizes[:num_windows], default=0),
            max_rows=max(sizes, default=0),
        )

    def table(self, shape: StepShape, reserved_slot: int, first_place: int) -> list[list[int]]:
        """What is uploaded: ``TABLE_ROWS`` rows of ``shape.table_width`` integers.

        Requests beyond the real ones are padding, on the reserved slot, and own no row: behind
        the windows, so that chunks are the shape's last, and behind these.

        Args:
            shape: the sizes, padding included.
            reserved_slot: the slot of padding.
            first_place: where the step's results begin among the host's.
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
        starts = zip(self.window_starts, self.window_starts[1:], strict=False)
        for slot, (start, stop) in zip(self.slots, starts, strict=True):
            yield slot, start, stop - start


def padded(shape: StepShape, multiple: int) -> StepShape:
    """A shape whose sizes are multiples of a number; of windows alone it stays one of windows."""

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


#: Every request of a shape is padding.
NO_REQUESTS = StepLayout(0, (), (), (), (), (0,), (0,))

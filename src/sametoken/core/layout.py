"""Where the rows of one step lie: what the host alone decides, from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sametoken.core.plan import StepPlan

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

    def holds(self, other: StepShape) -> bool:
        """Whether a step of another shape can run in this one, padded."""
        rooms = (
            (other.num_requests, self.num_requests),
            (other.num_rows, self.num_rows),
            (other.num_sampled, self.num_sampled),
            (other.max_rows, self.max_rows),
            (other.max_window if self.all_sampled else 0, self.max_window),
        )
        fits = all(needed <= room for needed, room in rooms)
        return fits and (other.all_sampled or not self.all_sampled)

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
        limits = [row.draft_limit for row in plan.rows]
        if num_drafts is not None:
            limits = [min(pair) for pair in zip(limits, num_drafts, strict=True)]
        sizes = [row.num_query + limit for row, limit in zip(plan.rows, limits, strict=True)]
        windows = [
            limit + 1 if row.samples else 0 for row, limit in zip(plan.rows, limits, strict=True)
        ]
        return cls(
            step_id=plan.step_id,
            slots=tuple(row.slot for row in plan.rows),
            num_query=tuple(row.num_query for row in plan.rows),
            draft_limit=tuple(limits),
            samples=tuple(row.samples for row in plan.rows),
            row_starts=tuple(accumulate(sizes, initial=0)),
            window_starts=tuple(accumulate(windows, initial=0)),
        )

    @property
    def shape(self) -> StepShape:
        """The sizes without padding."""
        pairs = zip(self.row_starts, self.row_starts[1:], strict=False)
        sizes = [stop - start for start, stop in pairs]
        num_windows = sum(
            query == 1 and samples
            for query, samples in zip(self.num_query, self.samples, strict=True)
        )
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

        Requests beyond the real ones are padding, on the reserved slot, and own no row.

        Args:
            shape: the sizes, padding included.
            reserved_slot: the slot of padding.
            first_place: where the step's results begin among the host's.
        """
        count = len(self.slots)
        padding = shape.table_width - count
        rows = [
            (self.slots, reserved_slot),
            (self.num_query, 0),
            (self.draft_limit, 0),
            (map(int, self.samples), 0),
            ([self.step_id] * count, self.step_id),
            (range(first_place, first_place + count), NO_PLACE),
            (self.row_starts[:-1], self.row_starts[-1]),
            (self.window_starts[:-1], self.window_starts[-1]),
        ]
        return [[*values, *[filler] * padding] for values, filler in rows]

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """Slot, first sampled row and number of sampled rows of each request."""
        starts = zip(self.window_starts, self.window_starts[1:], strict=False)
        for slot, (start, stop) in zip(self.slots, starts, strict=True):
            yield slot, start, stop - start


def padded(shape: StepShape, num_requests: int, num_rows: int, num_sampled: int) -> StepShape:
    """A shape with room for more: of windows alone it stays one of windows."""
    windows = num_requests if shape.all_sampled else shape.num_windows
    return replace(
        shape,
        num_requests=num_requests,
        num_rows=num_rows,
        num_sampled=num_sampled,
        num_windows=windows,
    )

"""Committed rows on their way to the host, each step's until its verdict is read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sametoken.drafters.extract import CommittedRows
from sametoken.state.upload import to_host


@dataclass(frozen=True, slots=True)
class CommittedRowsOutput:
    """A ``RowSink`` whose copies land in memory of their own, pinned on a GPU.

    They are enqueued inside the step, before its end is marked. So they have landed once the
    step's verdict has been waited for, and nothing else is waited for.
    """

    _in_flight: deque[CommittedRows] = field(default_factory=deque)

    def put(self, rows: CommittedRows) -> None:
        """Enqueue the copies of a step's rows."""
        self._in_flight.append(
            CommittedRows(
                step_id=rows.step_id,
                slots=to_host(rows.slots),
                positions=to_host(rows.positions),
                token_ids=to_host(rows.token_ids),
                next_token_ids=to_host(rows.next_token_ids),
                states=to_host(rows.states),
            )
        )

    def take(self, step_id: int) -> CommittedRows | None:
        """The rows of a step whose verdict has been read, in step order; None if it has none."""
        if self._in_flight and self._in_flight[0].step_id == step_id:
            return self._in_flight.popleft()
        return None

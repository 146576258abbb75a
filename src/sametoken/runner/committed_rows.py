"""Committed rows on their way to the host, each step's until its verdict is read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sametoken.drafters.extract import CommittedRows
from sametoken.errors import InvariantError
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
                step_ids=to_host(rows.step_ids),
                slots=to_host(rows.slots),
                positions=to_host(rows.positions),
                token_ids=to_host(rows.token_ids),
                next_token_ids=to_host(rows.next_token_ids),
                states=to_host(rows.states),
            )
        )

    def take(self, step_id: int) -> CommittedRows:
        """The rows of the oldest step, whose result has been read.

        Raises:
            InvariantError: it brought none, or they are another step's.
        """
        if not self._in_flight:
            raise InvariantError(f"step {step_id} was settled before its rows came")
        rows = self._in_flight.popleft()
        found = int(rows.step_ids[0])
        if found != step_id:
            raise InvariantError(f"step {step_id} brought the rows of step {found}")
        return rows

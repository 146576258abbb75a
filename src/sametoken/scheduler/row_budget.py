"""How the rows of one step are shared out."""

from __future__ import annotations

from collections.abc import Sequence

from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import Turn
from sametoken.scheduler.request_state import RequestState


class RowBudget:
    """Sizes of turns under the limits of a step."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.rows = limits.max_num_batched_tokens

    def chunk(self, request: RequestState, start: int) -> int:
        """Length of the prefill chunk from ``start``: to the grid's next point or prompt end."""
        grid = self._limits.prefill_chunk_size
        return min(grid - start % grid, request.prompt_len - start)

    def least_turn(self, request: RequestState) -> Turn | None:
        """A request's next turn without drafts.

        None if the steps in flight may already bring it to its length limit.
        """
        if request.prefilling:
            return Turn(request, self.chunk(request, request.position), 0)
        return None if request.at_limit else Turn(request, 1, 0)

    def turn(self, request: RequestState, rows_left: int) -> Turn | None:
        """A request's next turn, within so many rows; None if there is none.

        Drafts are as many as fit; chunks are never cut.
        """
        least = self.least_turn(request)
        if least is None or least.num_query > rows_left:
            return None
        if request.prefilling:
            return least
        most = request.max_drafts(self._limits.num_speculative_tokens)
        return Turn(request, 1, min(most, rows_left - 1))

    def share(
        self, decodes: Sequence[RequestState], prefills: Sequence[RequestState], reserved: int
    ) -> list[Turn]:
        """Turns for requests that can run; decodes leave ``reserved`` rows to chunks.

        Every decode gets its row before any gets drafts. Where not all fit, those served
        least recently go first; chunks go in the order given.
        """
        room = self.rows - reserved
        served = sorted(decodes, key=lambda request: (request.last_step, request.arrival))[:room]
        spare = room - len(served)
        turns: list[Turn] = []
        for index, request in enumerate(served):
            fair_share = spare // (len(served) - index)
            turn = self.turn(request, 1 + fair_share)
            if turn is not None:
                spare -= turn.draft_limit
                turns.append(turn)
        left = reserved + spare
        for request in prefills:
            turn = self.turn(request, left)
            if turn is None:
                break
            left -= turn.num_rows
            turns.append(turn)
        return turns

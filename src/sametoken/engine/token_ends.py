"""Where completions end by their tokens alone, told without any text."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.core.request import EngineRequest, RequestUpdate


@dataclass(slots=True)
class _Open:
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    num_kept: int


class TokenEnds:
    """Sees stop tokens and length limits in the process that steps.

    The serving process, which knows the text, comes to the same end or, at a stop string, to
    an earlier one; the engine need not wait for it to free a slot.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def add(self, request: EngineRequest) -> None:
        """Watch a completion."""
        self._open[request.request_id] = _Open(
            frozenset(request.stop_token_ids),
            request.max_total_tokens,
            len(request.prompt_token_ids),
        )

    def discard(self, request_id: str) -> bool:
        """Stop watching; whether the completion was watched, and so had not ended."""
        return self._open.pop(request_id, None) is not None

    def take(self, update: RequestUpdate) -> int | None:
        """Tokens of prompt and output that a completion keeps if this update ends it.

        None if it goes on, and for one that nobody watches. A poisoned one is forgotten: the
        scheduler has released it.
        """
        watched = self._open.get(update.request_id)
        if watched is None:
            return None
        if update.poisoned:
            self.discard(update.request_id)
            return None
        for token_id in update.token_ids:
            watched.num_kept += 1
            at_limit = watched.num_kept >= watched.max_total_tokens
            if at_limit or token_id in watched.stop_token_ids:
                self.discard(update.request_id)
                return watched.num_kept
        return None

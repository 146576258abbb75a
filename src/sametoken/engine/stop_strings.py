"""Stop strings in a text that grows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found in a text, at characters ``start`` to ``end``."""

    text: str
    start: int
    end: int


class StopStrings:
    """Finds the stop string that a reader of single characters would meet first."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)

    def find(self, text: str, num_seen: int) -> StopMatch | None:
        """The match that ends first, the longest of several, ending after ``num_seen``."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, num_seen - len(stop) + 1))
            if start >= 0:
                matches.append(StopMatch(stop, start, start + len(stop)))
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def num_safe(self, text: str) -> int:
        """Leading characters that no stop string begun at the text's end can take back."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)

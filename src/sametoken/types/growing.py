"""A completion that grows, and its beginnings: outputs share its storage instead of copying it.

Storage is only appended to, so a beginning never changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sametoken.types.outputs import PositionLogprobs


class GrowingText:
    """A text that is appended to."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        #: Where each piece ends.
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, piece: str) -> None:
        """Append a piece, possibly empty."""
        if piece:
            # A reader in another thread finds pieces by their ends, so these come last.
            self._pieces.append(piece)
            self._ends.append(len(self) + len(piece))

    def part(self, start: int, end: int) -> str:
        """The characters from ``start`` to ``end``, at the cost of this part."""
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, end - 1)
        before = self._ends[first - 1] if first else 0
        return "".join(self._pieces[first : last + 1])[start - before : end - before]


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of a completion that grows.

    Attributes:
        whole_text: its first ``num_characters`` are those of the beginning.
        whole_token_ids: its first ``num_tokens`` are those of the beginning.
        whole_logprobs: one entry per token, if requested.
        whole_starts: where the text of each token begins.
    """

    whole_text: GrowingText
    num_characters: int
    whole_token_ids: Sequence[int]
    num_tokens: int
    whole_logprobs: Sequence[PositionLogprobs] | None
    whole_starts: Sequence[int]

    def text(self, start: int = 0) -> str:
        """The text from a character on, at the cost of this part."""
        return self.whole_text.part(start, self.num_characters)

    def token_ids(self, start: int = 0) -> tuple[int, ...]:
        """The tokens from ``start`` on, at the cost of these."""
        return tuple(self.whole_token_ids[start : self.num_tokens])

    def logprobs(self, start: int = 0) -> tuple[PositionLogprobs, ...] | None:
        """The entries of ``token_ids(start)``, if requested."""
        if self.whole_logprobs is None:
            return None
        return tuple(self.whole_logprobs[start : self.num_tokens])

    def starts(self, first_token: int) -> list[int]:
        """Where the text of each token from ``first_token`` on begins."""
        return list(self.whole_starts[first_token : self.num_tokens])

    def pieces(self, first_token: int, start: int) -> list[str]:
        """The text from ``start`` on, parted by the tokens from ``first_token`` on."""
        # Text that was held back counts as that of the token it was shown with.
        ends = [*self.whole_starts[first_token + 1 : self.num_tokens], self.num_characters]
        pieces = []
        for end in (min(end, self.num_characters) for end in ends):
            pieces.append(self.whole_text.part(start, end))
            start = max(start, end)
        return pieces

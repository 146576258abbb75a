"""Bounds of a length while steps are in flight."""

from __future__ import annotations

from typing import NamedTuple

from sametoken.errors import InFlightError, InvariantError


class LenBound(NamedTuple):
    """An interval that holds a length in tokens.

    The length is ``lo`` if no draft in flight is accepted and ``hi`` if all are. ``hi`` sizes
    memory; only positions below ``lo`` may be indexed (tests/unit/types/test_length_bound.py).
    """

    lo: int
    hi: int

    @classmethod
    def known(cls, length: int) -> LenBound:
        """The bound of a length that no step in flight can change."""
        return cls(length, length)

    @property
    def exact(self) -> int:
        """The length, if no step in flight can change it.

        Raises:
            InFlightError: while ``lo`` and ``hi`` differ.
        """
        if self.lo != self.hi:
            raise InFlightError(f"length is only known to lie in [{self.lo}, {self.hi}]")
        return self.lo

    def after_launch(self, draft_limit: int) -> LenBound:
        """The bound once a step that samples with up to ``draft_limit`` drafts is enqueued."""
        return LenBound(self.lo + 1, self.hi + 1 + draft_limit)

    def after_result(self, draft_limit: int, num_accepted: int) -> LenBound:
        """The bound once the host has the result of a step with that draft limit.

        Raises:
            InvariantError: more drafts were accepted than the step could verify, or its limit
                was never launched.
        """
        if not 0 <= num_accepted <= draft_limit:
            raise InvariantError(f"{num_accepted} of at most {draft_limit} drafts were accepted")
        if not draft_limit:
            return self
        lo, hi = self.lo + num_accepted, self.hi - (draft_limit - num_accepted)
        if lo > hi:
            raise InvariantError(f"length bound [{lo}, {hi}] is not an interval")
        return LenBound(lo, hi)

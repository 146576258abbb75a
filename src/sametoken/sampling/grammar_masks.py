"""Grammar masks: every window row knows the text that its own drafts would make.

A matcher moves over committed tokens alone. Each step first takes up what the steps before
have committed, then tries the window's drafts on a copy, so a rejected draft leaves no trace
(tests/e2e/test_structured_outputs.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.state.host_copy import HostCopy
from sametoken.state.sequences import Sequences
from sametoken.state.upload import to_device, upload
from sametoken.types.plan import Admission
from sametoken.types.structured_outputs import (
    MaskFault,
    Matcher,
)

#: Seconds that a request's masks may take beyond the seconds that each of them may. Of 150,000
#: tokens an ordinary mask takes 1 ms, and the costliest of JSON's 8 ms.
MASK_CREDIT_S = 0.5
MASK_SECONDS = 0.005

_logger = logging.getLogger("sametoken")
_FORBIDDEN = float("-inf")
_EVERYTHING, _NOTHING = -1, 0
_WORD_BITS = 32

# Rows are independent, so a bounded number at a time costs no bits and saves memory.
_ROWS_AT_A_TIME = 16


class SlowGrammarError(Exception):
    """A request's masks took longer than they may."""


@dataclass(slots=True)
class MaskBudget:
    """What one request's masks may still take.

    Attributes:
        credit_s: seconds left; each mask brings some, up to ``MASK_CREDIT_S`` in all.
    """

    credit_s: float = MASK_CREDIT_S

    def add_mask(self) -> None:
        """One more mask is about to be made."""
        self.credit_s = min(MASK_CREDIT_S, self.credit_s + MASK_SECONDS)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count what the block takes, by this thread's own clock: a busy machine costs nothing.

        A call cannot be stopped; but what a matcher takes grows token by token, so the first
        call that goes beyond the budget is only a little beyond.

        Raises:
            SlowGrammarError: it was too much.
        """
        began = time.thread_time()
        yield
        self.credit_s -= time.thread_time() - began
        if self.credit_s < 0:
            raise SlowGrammarError


@dataclass(frozen=True, slots=True)
class BudgetedMatcher:
    """A matcher whose copies all draw on one budget."""

    inner: Matcher
    budget: MaskBudget

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        with self.budget.spending():
            return self.inner.accept(token_id)

    def copy(self) -> BudgetedMatcher:
        """See ``Matcher``."""
        with self.budget.spending():
            return BudgetedMatcher(self.inner.copy(), self.budget)

    def fill(self, masks: Tensor, row: int) -> None:
        """See ``Matcher``."""
        self.budget.add_mask()
        with self.budget.spending():
            self.inner.fill(masks, row)


@dataclass(slots=True)
class Cursor:
    """One request's place in its grammar.

    Attributes:
        matcher: has accepted the output below ``position``.
        position: committed tokens, prompt included, that it has seen.
        lost: why the matcher says nothing any more, if so.
    """

    matcher: Matcher
    position: int
    lost: MaskFault = MaskFault.NONE

    def advance(self, newest: list[int], num_tokens: int, masks: Tensor, drafts: list[int]) -> None:
        """Take up committed tokens, then write the masks of a window.

        Args:
            newest, num_tokens: as in ``catch_up``.
            masks, drafts: as in ``fill``; nothing is allowed once the cursor is lost.
        """
        try:
            self.catch_up(newest, num_tokens)
            if not self.lost:
                self.fill(masks, drafts)
        except SlowGrammarError:
            self.lost = MaskFault.SLOW
        except RuntimeError:
            # A defect of the grammar library costs its own request, not the engine.
            _logger.exception("the matcher of a grammar failed")
            self.lost = MaskFault.BROKEN
        if self.lost:
            masks.fill_(_NOTHING)

    def catch_up(self, newest: list[int], num_tokens: int) -> None:
        """Take up committed tokens.

        Args:
            newest: the last committed tokens, all that were not seen among them.
            num_tokens: how many are committed.
        """
        for token_id in newest[len(newest) - (num_tokens - self.position) :]:
            if not self.lost and not self.matcher.accept(token_id):
                self.lost = MaskFault.BROKEN
        self.position = num_tokens

    def fill(self, masks: Tensor, drafts: list[int]) -> None:
        """Write the masks of a window. Its drafts are tried on a copy of the matcher.

        A draft that the grammar refuses cannot be accepted, so the rows after it decide
        nothing and stay as they are.

        Args:
            masks: [d + 1, ceil(V / 32)] int32, every bit set; written.
            drafts: the window's d drafts.
        """
        self.matcher.fill(masks, 0)
        ahead = self.matcher.copy() if drafts else self.matcher
        for row, draft in enumerate(drafts, 1):
            if not ahead.accept(draft):
                break
            ahead.fill(masks, row)


class SlotGrammars:
    """Cursors of the slots whose requests have a grammar.

    Args:
        sequences: committed tokens; read only.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._cursors: dict[int, Cursor] = {}

    def admit(self, admission: Admission) -> None:
        """Replace the slot's former cursor."""
        self._cursors.pop(admission.slot, None)
        if admission.grammar is not None:
            matcher = BudgetedMatcher(admission.grammar.new_matcher(), MaskBudget())
            self._cursors[admission.slot] = Cursor(matcher, len(admission.prompt_token_ids))

    def look(self, windows: Iterable[tuple[int, int]]) -> Look | None:
        """Enqueue the copy of what masks depend on: committed tokens and published drafts.

        Before the step that judges the windows, so that the host may work beside its forward
        pass. None, at no cost, if no window has a grammar.

        Args:
            windows: slot and draft limit of each window; -1 in place of a slot for none.
        """
        places = [
            (place, slot, limit)
            for place, (slot, limit) in enumerate(windows)
            if slot in self._cursors
        ]
        if not places:
            return None
        sequences = self._sequences
        _, slots, limits = upload(places, sequences.device).unbind(1)
        num_tokens, num_drafts = sequences.num_tokens[slots], sequences.num_drafts[slots]
        # A step commits at most k + 1 tokens, so as many are read of each slot.
        reach = torch.arange(sequences.num_speculative_tokens, -1, -1, device=sequences.device)
        where = (num_tokens[:, None] - 1 - reach).clamp(min=0)
        newest = sequences.token_ids[slots[:, None], where]
        counts = torch.stack((num_tokens, torch.minimum(num_drafts, limits)), dim=1)
        values = torch.cat((counts, newest, sequences.draft_ids[slots]), dim=1)
        cursors = [(place, self._cursors[slot]) for place, slot, _ in places]
        return Look(tuple(cursors), HostCopy.of(values), sequences.num_speculative_tokens + 1)


@dataclass(frozen=True, slots=True)
class Look:
    """What the masks of some windows depend on, on its way to the host.

    Attributes:
        cursors: place among the windows, and cursor, of those with a grammar.
        values: [cursors, 2 + newest + k] int64: ``num_tokens``, number of drafts, the newest
            committed tokens, the drafts.
        num_newest: committed tokens that were read of each.
    """

    cursors: tuple[tuple[int, Cursor], ...]
    values: HostCopy
    num_newest: int

    def masks(self, vocab_size: int) -> Iterator[tuple[int, Tensor, MaskFault]]:
        """Advance the cursors: place, masks of the window in host memory, why it is lost."""
        rows = self.values.rows()
        for (place, cursor), (num_tokens, num_drafts, *ids) in zip(self.cursors, rows, strict=True):
            newest, drafts = ids[: self.num_newest], ids[self.num_newest :][:num_drafts]
            masks = _permissive(num_drafts + 1, vocab_size)
            cursor.advance(newest, num_tokens, masks, drafts)
            yield place, masks, cursor.lost


def _permissive(num_rows: int, vocab_size: int) -> Tensor:
    """[num_rows, words] int32 in host memory, every bit set; pinned where it may travel."""
    words = -(-vocab_size // _WORD_BITS)
    pinned = torch.cuda.is_available()
    return torch.full((num_rows, words), _EVERYTHING, dtype=torch.int32, pin_memory=pinned)


def forbid(window: Tensor, masks: Tensor) -> None:
    """Write -inf where a bit is not set.

    Args:
        window: [rows, V] fp32, written.
        masks: [rows, ceil(V / 32)] int32 in host memory.
    """
    words = to_device(masks, window.device)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=window.device)
    for first in range(0, window.shape[0], _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        allowed = (words[rows, :, None] >> bits) & 1
        forbidden = allowed.flatten(1)[:, : window.shape[1]] == 0
        window[rows].masked_fill_(forbidden, _FORBIDDEN)

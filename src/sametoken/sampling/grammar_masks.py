"""Grammar masks: each row of a window is masked for the text with all earlier drafts accepted.

A matcher accepts committed tokens only. Each step first accepts the newly committed tokens, then
tries the window's drafts on a copy, so a rejected draft leaves no trace
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
from sametoken.types.structured_outputs import MASK_CREDIT_S, MASK_SECONDS, MaskFault, Matcher

_logger = logging.getLogger("sametoken")
_FORBIDDEN = float("-inf")
_ALL_ALLOWED, _NONE_ALLOWED = -1, 0
_WORD_BITS = 32

# Rows are independent, so chunking changes no bits and bounds memory.
_ROWS_PER_CHUNK = 16


class SlowGrammarError(Exception):
    """A request's masks exceeded their time budget."""


@dataclass(slots=True)
class MaskBudget:
    """Time budget of one request's masks.

    Attributes:
        credit_s: seconds left; each mask adds some, up to ``MASK_CREDIT_S`` in total.
    """

    credit_s: float = MASK_CREDIT_S

    def add_mask(self) -> None:
        """Add the allowance of one mask."""
        self.credit_s = min(MASK_CREDIT_S, self.credit_s + MASK_SECONDS)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Charge the block's CPU time on this thread, which other load does not inflate.

        A call cannot be interrupted, but a matcher's cost grows token by token, so the first
        call over budget is only slightly over.

        Raises:
            SlowGrammarError: the budget is spent.
        """
        began = time.thread_time()
        yield
        self.credit_s -= time.thread_time() - began
        if self.credit_s < 0:
            raise SlowGrammarError


@dataclass(frozen=True, slots=True)
class BudgetedMatcher:
    """A matcher whose copies share one budget."""

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
    """One request's position in its grammar.

    Attributes:
        matcher: has accepted the output below ``position``.
        position: committed tokens seen, prompt included.
        fault: why the matcher is no longer used, if so.
    """

    matcher: Matcher
    position: int
    fault: MaskFault = MaskFault.NONE

    def advance(self, newest: list[int], num_tokens: int, masks: Tensor, drafts: list[int]) -> None:
        """Accept committed tokens, then write the masks of a window.

        Args:
            newest, num_tokens: as in ``catch_up``.
            masks, drafts: as in ``fill``; no token is allowed after a fault.
        """
        try:
            self.catch_up(newest, num_tokens)
            if not self.fault:
                self.fill(masks, drafts)
        except SlowGrammarError:
            self.fault = MaskFault.SLOW
        except RuntimeError:
            # An error in the grammar library fails its request, not the engine.
            _logger.exception("the matcher of a grammar failed")
            self.fault = MaskFault.BROKEN
        if self.fault:
            masks.fill_(_NONE_ALLOWED)

    def catch_up(self, newest: list[int], num_tokens: int) -> None:
        """Accept committed tokens.

        Args:
            newest: the last committed tokens, including all that are unseen.
            num_tokens: number of committed tokens.
        """
        for token_id in newest[len(newest) - (num_tokens - self.position) :]:
            if not self.fault and not self.matcher.accept(token_id):
                self.fault = MaskFault.BROKEN
        self.position = num_tokens

    def fill(self, masks: Tensor, drafts: list[int]) -> None:
        """Write the masks of a window; drafts are tried on a copy of the matcher.

        A draft outside the grammar cannot be accepted, so later rows are never used and stay
        unmasked.

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
    """Cursors by slot, for requests with a grammar.

    Args:
        sequences: device state, read only.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._cursors: dict[int, Cursor] = {}

    def admit(self, admission: Admission) -> None:
        """Replace the slot's cursor."""
        self._cursors.pop(admission.slot, None)
        if admission.grammar is not None:
            matcher = BudgetedMatcher(admission.grammar.new_matcher(), MaskBudget())
            self._cursors[admission.slot] = Cursor(matcher, len(admission.prompt_token_ids))

    def start_masks(self, windows: Iterable[tuple[int, int]]) -> PendingMasks | None:
        """Enqueue the copy that masks depend on: committed tokens and published drafts.

        Called before the forward pass, so that the host makes masks while it runs. None if no
        window has a grammar, at no cost if no slot has.

        Args:
            windows: slot and draft limit of each request; slot -1 for a request without a window.
        """
        if not self._cursors:
            return None
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
        # A step commits at most k + 1 tokens, so that many are read per slot.
        reach = torch.arange(sequences.num_speculative_tokens, -1, -1, device=sequences.device)
        where = (num_tokens[:, None] - 1 - reach).clamp(min=0)
        newest = sequences.token_ids[slots[:, None], where]
        counts = torch.stack((num_tokens, torch.minimum(num_drafts, limits)), dim=1)
        values = torch.cat((counts, newest, sequences.draft_ids[slots]), dim=1)
        cursors = [(place, self._cursors[slot]) for place, slot, _ in places]
        num_newest = sequences.num_speculative_tokens + 1
        return PendingMasks(tuple(cursors), HostCopy.of(values), num_newest)


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks of a step's windows, whose inputs are being copied to the host.

    Attributes:
        cursors: index among the windows, and cursor, of those with a grammar.
        values: [cursors, 2 + newest + k] int64: ``num_tokens``, number of drafts, the newest
            committed tokens, the drafts.
        num_newest: committed tokens read per slot.
    """

    cursors: tuple[tuple[int, Cursor], ...]
    values: HostCopy
    num_newest: int

    def masks(self, vocab_size: int) -> Iterator[tuple[int, Tensor, MaskFault]]:
        """Advance the cursors: window index, its masks in host memory, fault of its cursor."""
        rows = self.values.rows()
        for (place, cursor), (num_tokens, num_drafts, *ids) in zip(self.cursors, rows, strict=True):
            newest, drafts = ids[: self.num_newest], ids[self.num_newest :][:num_drafts]
            masks = _all_allowed(num_drafts + 1, vocab_size)
            cursor.advance(newest, num_tokens, masks, drafts)
            yield place, masks, cursor.fault


def _all_allowed(num_rows: int, vocab_size: int) -> Tensor:
    """[num_rows, words] int32 in host memory, every bit set; pinned if there is a GPU."""
    words = -(-vocab_size // _WORD_BITS)
    pinned = torch.cuda.is_available()
    return torch.full((num_rows, words), _ALL_ALLOWED, dtype=torch.int32, pin_memory=pinned)


def apply_masks(window: Tensor, masks: Tensor) -> None:
    """Write -inf where a mask bit is not set.

    Args:
        window: [rows, V] fp32, written.
        masks: [rows, ceil(V / 32)] int32 in host memory.
    """
    words = to_device(masks, window.device)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=window.device)
    for first in range(0, window.shape[0], _ROWS_PER_CHUNK):
        rows = slice(first, first + _ROWS_PER_CHUNK)
        allowed = (words[rows, :, None] >> bits) & 1
        forbidden = allowed.flatten(1)[:, : window.shape[1]] == 0
        window[rows].masked_fill_(forbidden, _FORBIDDEN)

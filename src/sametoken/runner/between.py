"""Between the halves of a captured step: what requests ask of their logits.

All of it is enqueued in stream order. The host waits for nothing, but where a request has a
grammar: for the step before, whose tokens its mask depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sametoken.core.plan import Admission, PlanRow
from sametoken.core.sampling_params import SamplingParams
from sametoken.kernels.interface import Kernels, SampledRows
from sametoken.models.base import CausalLM
from sametoken.runner.async_output import HostBuffer
from sametoken.runner.padded import Computed
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.verification.base import TokenLogprobs
from sametoken.verification.grammar import Look, SlotGrammars, forbid
from sametoken.verification.logprobs import ScoredRows, score_prompt, score_rows


class Between(Protocol):
    """What stands around the halves of one launch."""

    def look(self) -> None:
        """Before the first: send the host what it must know between the halves."""
        ...

    def process(self, computed: Computed) -> None:
        """Take what is to be reported of raw logits, then change them in place."""
        ...

    def score(self, tokens: Tensor) -> None:
        """Report the log-probabilities of the target's own tokens, [B, W]."""
        ...


@dataclass(frozen=True, slots=True)
class LogitsProcessing:
    """What the requests in the slots ask of their logits, beside temperature and truncation.

    Attributes:
        sequences, model: score prompts.
        kernels: apply rules.
        table: what each slot asks, on the device and on the host.
        grammars: of the slots.
    """

    sequences: Sequences
    model: CausalLM
    kernels: Kernels
    table: SamplingTable
    grammars: SlotGrammars

    def warm_up(self) -> None:
        """Compile what applies rules, before a request waits for it. All slots must be free."""
        everything = SamplingParams(
            temperature=0.0, repetition_penalty=2.0, logit_bias={0: 1.0}, allowed_token_ids=(0,)
        )
        device = self.sequences.device
        row = torch.zeros(1, dtype=torch.int64, device=device)
        logits = torch.zeros(1, self.model.config.vocab_size, device=device)
        for params in (everything, SamplingParams(temperature=0.0)):
            self.table.admit(Admission(0, (0,), 0, params))
            self.kernels.apply_rules(
                logits, SampledRows(row, row, row, row), self.sequences, self.table.rules
            )

    def of_launch(self, rows: Sequence[PlanRow], buffer: HostBuffer, first: int) -> Between:
        """What the rows of one launch ask.

        Args:
            rows: in the order of the launch.
            buffer: of the step, for candidates.
            first: the launch's first row in it.
        """
        return LaunchProcessing(self, tuple(rows), buffer, first)


@dataclass(slots=True)
class LaunchProcessing:
    """``Between`` of one launch."""

    asked: LogitsProcessing
    rows: tuple[PlanRow, ...]
    buffer: HostBuffer
    first: int
    _look: Look | None = None
    _scored: tuple[ScoredRows, Tensor] | None = None
    _prompt_logprobs: TokenLogprobs | None = None

    def look(self) -> None:
        """See ``Between``."""
        windows = ((row.slot if row.samples else -1, row.draft_limit) for row in self.rows)
        self._look = self.asked.grammars.look(windows)

    def process(self, computed: Computed) -> None:
        """See ``Between``."""
        window = computed.logits.shape[0] // computed.x.slots.shape[0]
        self._prompt_logprobs = self._score_prompt(computed)
        self._scored = self._keep_raw(computed.logits, window)
        rules = self.asked.table.rules
        ruled = any(row.slot in rules.edits or row.slot in rules.counters for row in self.rows)
        if not ruled and self._look is None:
            return
        logits = computed.logits
        # A row that holds NaN fails its request, wherever its masks would hide it.
        has_nan = logits.amax(dim=-1, keepdim=True).isnan()
        if ruled:
            self._apply_rules(computed, window)
        if self._look is not None:
            self._apply_masks(self._look, logits, window)
        logits[:, :1].masked_fill_(has_nan, torch.nan)

    def score(self, tokens: Tensor) -> None:
        """See ``Between``."""
        logprobs = None
        if self._scored is not None:
            scored, raw = self._scored
            logprobs = score_rows(scored, raw, tokens.flatten()[scored.index])
        self.buffer.keep(len(self.rows), self.first, logprobs, self._prompt_logprobs)

    def _keep_raw(self, logits: Tensor, window: int) -> tuple[ScoredRows, Tensor] | None:
        windows = [
            (row.slot, index * window, window if row.samples else 0)
            for index, row in enumerate(self.rows)
        ]
        scored = _scored_rows(self.asked.table.num_logprobs, windows, logits.device)
        return None if scored is None else (scored, logits.index_select(0, scored.index))

    def _apply_rules(self, computed: Computed, window: int) -> None:
        logits, sequences = computed.logits, self.asked.sequences
        offsets = torch.arange(logits.shape[0], device=logits.device) % window
        rows = SampledRows(computed.slots, computed.positions, computed.token_ids, offsets)
        self.asked.kernels.apply_rules(logits, rows, sequences, self.asked.table.rules)

    def _apply_masks(self, look: Look, logits: Tensor, window: int) -> None:
        """Forbid what grammars do; the device computes the logits while the host makes masks."""
        for place, masks, lost in look.masks(logits.shape[1]):
            start = place * window
            forbid(logits[start : start + masks.shape[0]], masks)
            if lost:
                self.buffer.lost[self.first + place] = lost

    def _score_prompt(self, computed: Computed) -> TokenLogprobs | None:
        """Score prompt token p + 1 by the row at p; the last prompt row predicts output."""
        rows_each, at = computed.x.rows_per_plan_row, computed.x.rows
        windows = [
            (row.slot, index * rows_each, row.num_query - row.samples)
            for index, row in enumerate(self.rows)
        ]
        asked = self.asked
        scored = _scored_rows(asked.table.num_prompt_logprobs, windows, at.slots.device)
        if scored is None:
            return None
        following = asked.sequences.token_ids[
            at.slots[scored.index], at.positions[scored.index] + 1
        ]
        return score_prompt(scored, computed.hidden.last, following, asked.model.compute_logits)


def _scored_rows(
    asked: Mapping[int, int], windows: Sequence[tuple[int, int, int]], device: torch.device
) -> ScoredRows | None:
    """The rows of those who asked; None, at no cost, if nobody did."""
    if not any(slot in asked and count for slot, _, count in windows):
        return None
    return ScoredRows.of(asked, windows, device)

"""Between the halves of a step: what requests ask of their logits.

All of it is enqueued in stream order. The host waits for nothing, but where a request has a
grammar: for the step before, whose tokens its mask depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.base import CausalLM
from sametoken.ops.backend import (
    Kernels,
    SampledRows,
)
from sametoken.runner.async_output import HostBuffer
from sametoken.runner.step import ForwardOutput
from sametoken.sampling.grammar_masks import (
    Look,
    SlotGrammars,
    forbid,
)
from sametoken.sampling.logprobs import (
    ScoredRows,
    TokenLogprobs,
    score_prompt,
    score_rows,
)
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.types.layout import StepLayout
from sametoken.types.plan import Admission
from sametoken.types.sampling_params import SamplingParams


class Between(Protocol):
    """What stands around the halves of one step."""

    def look(self) -> None:
        """Before the first: send the host what it must know between the halves."""
        ...

    def process(self, computed: ForwardOutput) -> None:
        """Take what is to be reported of raw logits, then change them in place."""
        ...

    def score(self, tokens: Tensor) -> None:
        """Report the log-probabilities of the target's own tokens, [L]."""
        ...


@dataclass(frozen=True, slots=True)
class LogitsProcessing:
    """What the requests in the slots ask of their logits, beside temperature and truncation.

    Attributes:
        sequences, model: score prompts.
        kernels: apply rules.
        table: what each slot asks, on the device and on the host.
        grammars: of the slots.
        parallel: the ranks that share the model; grammars are for rank 0, which decides.
    """

    sequences: Sequences
    model: CausalLM
    kernels: Kernels
    table: SamplingTable
    grammars: SlotGrammars
    parallel: TensorParallel = SINGLE_RANK

    def admit(self, admission: Admission) -> None:
        """Take up a slot's parameters, replacing its former request's."""
        self.table.admit(admission)
        grammar = admission.grammar if self.parallel.rank == 0 else None
        self.grammars.admit(replace(admission, grammar=grammar))

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
                logits, SampledRows(None, row, row, row, row), self.sequences, self.table.rules
            )

    def of_step(self, layout: StepLayout, buffer: HostBuffer) -> Between:
        """What the requests of a step ask.

        Args:
            layout: of the step.
            buffer: of the step, for candidates.
        """
        return StepProcessing(self, layout, buffer)


@dataclass(slots=True)
class StepProcessing:
    """``Between`` of one step."""

    asked: LogitsProcessing
    layout: StepLayout
    buffer: HostBuffer
    _look: Look | None = None
    _scored: tuple[ScoredRows, Tensor] | None = None
    _prompt_logprobs: TokenLogprobs | None = None

    def look(self) -> None:
        """See ``Between``."""
        rows = zip(self.layout.slots, self.layout.samples, self.layout.draft_limit, strict=True)
        windows = ((slot if samples else -1, limit) for slot, samples, limit in rows)
        self._look = self.asked.grammars.look(windows)

    def process(self, computed: ForwardOutput) -> None:
        """See ``Between``."""
        logits, rules = computed.logits, self.asked.table.rules
        self._prompt_logprobs = self._score_prompt(computed)
        self._scored = self._keep_raw(logits)
        ruled = any(slot in rules.edits or slot in rules.counters for slot in self.layout.slots)
        if not ruled and self._look is None:
            return
        # A row that holds NaN fails its request, wherever its masks would hide it.
        has_nan = logits.amax(dim=-1, keepdim=True).isnan()
        if ruled:
            rows = computed.x.sampled
            self.asked.kernels.apply_rules(logits, rows, self.asked.sequences, rules)
        if self._look is not None:
            self._apply_masks(self._look, logits)
        logits[:, :1].masked_fill_(has_nan, torch.nan)

    def score(self, tokens: Tensor) -> None:
        """See ``Between``."""
        logprobs = None
        if self._scored is not None:
            scored, raw = self._scored
            logprobs = score_rows(scored, raw, tokens.index_select(0, scored.index))
        self.buffer.keep(logprobs, self._prompt_logprobs)

    def _keep_raw(self, logits: Tensor) -> tuple[ScoredRows, Tensor] | None:
        asked = self.asked.table.num_logprobs
        scored = _scored_rows(asked, tuple(self.layout.windows()), logits.device)
        return None if scored is None else (scored, logits.index_select(0, scored.index))

    def _apply_masks(self, look: Look, logits: Tensor) -> None:
        """Forbid what grammars do; the device computes the logits while the host makes masks."""
        for place, masks, lost in look.masks(logits.shape[1]):
            start = self.layout.window_starts[place]
            forbid(logits[start : start + masks.shape[0]], masks)
            if lost:
                self.buffer.lost[place] = lost

    def _score_prompt(self, computed: ForwardOutput) -> TokenLogprobs | None:
        """Score prompt token p + 1 by the row at p; the last prompt row predicts output."""
        layout, asked, at = self.layout, self.asked, computed.x.rows
        counts = (n - s for n, s in zip(layout.num_query, layout.samples, strict=True))
        windows = tuple(zip(layout.slots, layout.row_starts, counts, strict=False))
        scored = _scored_rows(asked.table.num_prompt_logprobs, windows, at.slots.device)
        if scored is None:
            return None
        slots, positions = at.slots[scored.index], at.positions[scored.index]
        following = asked.sequences.token_ids[slots, positions + 1]
        return score_prompt(scored, computed.hidden.last, following, asked.model.compute_logits)


def _scored_rows(
    asked: Mapping[int, int], windows: Sequence[tuple[int, int, int]], device: torch.device
) -> ScoredRows | None:
    """The rows of those who asked; None, at no cost, if nobody did."""
    if not any(slot in asked and count for slot, _, count in windows):
        return None
    return ScoredRows.of(asked, windows, device)

"""Logits processing between the halves of a step: rules, grammar masks, log-probabilities.

All of it is enqueued in stream order. The host waits only for a grammar: its masks depend on the
previous step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sametoken.config import PROCESSED_LOGPROBS, RAW_LOGPROBS
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.base import CausalLM
from sametoken.ops.backend import Kernels, SampledRows
from sametoken.ops.step.types import StepOps, TableWrite
from sametoken.runner.async_output import HostBuffer
from sametoken.runner.step import ForwardOutput
from sametoken.sampling.grammar_masks import PendingMasks, SlotGrammars, apply_masks
from sametoken.sampling.logprobs import ScoredRows, TokenLogprobs, score_prompt, score_rows
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.types.layout import StepLayout
from sametoken.types.plan import Admission, StepPlan
from sametoken.types.sampling_params import SamplingParams


class StepLogitsProcessor(Protocol):
    """Hooks around the two halves of one step, in call order."""

    def start_masks(self) -> None:
        """Before the forward pass: start the copies that grammar masks depend on."""
        ...

    def process(self, output: ForwardOutput) -> None:
        """Process the logits in place; those that log-probabilities need are kept."""
        ...

    def gather_logprobs(self, tokens: Tensor) -> None:
        """Report the log-probabilities of the target's tokens, [L]."""
        ...


@dataclass(frozen=True, slots=True)
class LogitsProcessing:
    """Logits processing of all slots, beyond temperature and truncation.

    Attributes:
        sequences, model: for prompt log-probabilities.
        kernels: apply rules.
        table: sampling parameters by slot.
        grammars: grammars by slot.
        parallel: the ranks that share the model; only rank 0, which decides, has grammars.
        logprobs_mode: whether log-probabilities of output tokens are the model's, or those of the
            distribution that they are chosen from.
    """

    sequences: Sequences
    model: CausalLM
    kernels: Kernels
    table: SamplingTable
    grammars: SlotGrammars
    parallel: TensorParallel = SINGLE_RANK
    logprobs_mode: str = RAW_LOGPROBS

    def admit(self, admission: Admission) -> list[TableWrite]:
        """What sets a slot's parameters, replacing those of its previous request."""
        grammar = admission.grammar if self.parallel.rank == 0 else None
        self.grammars.admit(replace(admission, grammar=grammar))
        return self.table.admit(admission)

    def scores_prompts(self, plan: StepPlan) -> bool:
        """Whether a step has prompt rows with log-probabilities requested."""
        requested = self.table.num_prompt_logprobs
        return bool(requested) and any(
            one.slot in requested and one.num_query > one.samples for one in plan.requests
        )

    def warm_up(self, ops: StepOps) -> None:
        """Compile what admissions and rules run before any request does. All slots are free."""
        with_rules = SamplingParams(
            temperature=0.0, repetition_penalty=2.0, logit_bias={0: 1.0}, allowed_token_ids=(0,)
        )
        device = self.sequences.device
        row = torch.zeros(1, dtype=torch.int64, device=device)
        logits = torch.zeros(1, self.model.config.vocab_size, dtype=torch.float32, device=device)
        for params in (with_rules, SamplingParams(temperature=0.0)):
            ops.write_tables(self.table.admit(Admission(0, (0,), 0, params)))
            self.kernels.apply_rules(
                logits, SampledRows(None, row, row, row, row), self.sequences, self.table.rules
            )

    def of_step(self, layout: StepLayout, buffer: HostBuffer) -> StepLogitsProcessor:
        """The logits processor of one step; log-probabilities go to its ``buffer``."""
        return StepProcessing(self, layout, buffer)


@dataclass(slots=True)
class StepProcessing:
    """``StepLogitsProcessor`` over the slots' parameters."""

    processing: LogitsProcessing
    layout: StepLayout
    buffer: HostBuffer
    _pending_masks: PendingMasks | None = None
    _scored: tuple[ScoredRows, Callable[[], Tensor]] | None = None
    _prompt_logprobs: TokenLogprobs | None = None

    def start_masks(self) -> None:
        """See ``StepLogitsProcessor``."""
        rows = zip(self.layout.slots, self.layout.samples, self.layout.draft_limit, strict=True)
        windows = ((slot if samples else -1, limit) for slot, samples, limit in rows)
        self._pending_masks = self.processing.grammars.start_masks(windows)

    def process(self, output: ForwardOutput) -> None:
        """See ``StepLogitsProcessor``."""
        logits, rules = output.logits, self.processing.table.rules
        self._prompt_logprobs = self._score_prompt(output)
        self._scored = self._keep(output)
        with_rules = rules.edits.keys() | rules.counters.keys()
        has_rules = not with_rules.isdisjoint(self.layout.slots)
        if not has_rules and self._pending_masks is None:
            return
        # A row with NaN logits fails its request, even where a mask would hide the NaN.
        has_nan = logits.amax(dim=-1, keepdim=True).isnan()
        if has_rules:
            rows = output.x.sampled
            self.processing.kernels.apply_rules(logits, rows, self.processing.sequences, rules)
        if self._pending_masks is not None:
            self._apply_masks(self._pending_masks, logits)
        logits[:, :1].masked_fill_(has_nan, torch.nan)

    def gather_logprobs(self, tokens: Tensor) -> None:
        """See ``StepLogitsProcessor``."""
        logprobs = None
        if self._scored is not None:
            scored, logits = self._scored
            logprobs = score_rows(scored, logits(), tokens.index_select(0, scored.index))
        self.buffer.keep(logprobs, self._prompt_logprobs)

    def _keep(self, output: ForwardOutput) -> tuple[ScoredRows, Callable[[], Tensor]] | None:
        """The rows with log-probabilities requested, and what gives their logits later."""
        logits, requested = output.logits, self.processing.table.num_logprobs
        scored = ScoredRows.of(requested, self.layout.windows(), logits.device)
        if scored is None:
            return None
        if self.processing.logprobs_mode == PROCESSED_LOGPROBS:
            return scored, partial(self._processed, output, scored.index)
        raw = logits.index_select(0, scored.index)
        return scored, lambda: raw

    def _processed(self, output: ForwardOutput, index: Tensor) -> Tensor:
        """Logits of the tokens' distribution, which the second half has truncated in place."""
        slots = output.x.sampled.slots.index_select(0, index)
        temperature = self.processing.table.temperature.index_select(0, slots)
        # Greedy rows have no temperature.
        temperature = torch.where(temperature > 0, temperature, 1.0)
        return output.logits.index_select(0, index) / temperature[:, None]

    def _apply_masks(self, pending: PendingMasks, logits: Tensor) -> None:
        """Apply grammar masks; the host makes them while the device computes the logits."""
        for place, masks, fault in pending.masks(logits.shape[1]):
            start = self.layout.window_starts[place]
            apply_masks(logits[start : start + masks.shape[0]], masks)
            if fault:
                self.buffer.mask_faults[place] = fault

    def _score_prompt(self, output: ForwardOutput) -> TokenLogprobs | None:
        """Score prompt token p + 1 by the row at p; the last prompt row predicts output."""
        layout, processing, at = self.layout, self.processing, output.x.rows
        counts = (n - s for n, s in zip(layout.num_query, layout.samples, strict=True))
        chunks = zip(layout.slots, layout.row_starts, counts, strict=False)
        scored = ScoredRows.of(processing.table.num_prompt_logprobs, chunks, at.slots.device)
        if scored is None:
            return None
        slots, positions = at.slots[scored.index], at.positions[scored.index]
        following = processing.sequences.token_ids[slots, positions + 1]
        return score_prompt(
            scored,
            output.hidden.last,
            following,
            processing.table.prompt_temperature[slots],
            processing.model.compute_logits,
        )

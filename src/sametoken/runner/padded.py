"""The seven verbs at fixed shapes: what one CUDA graph holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.core.plan import Admission
from sametoken.drafters.base import Drafter
from sametoken.drafters.padded import PaddedDraftContext
from sametoken.kernels.outcome.triton import pack
from sametoken.kernels.sampling.triton import window_keys
from sametoken.kernels.truncation.triton import truncate
from sametoken.layers.parallel import ALONE, TensorParallel, gather_columns
from sametoken.models.base import CausalLM, HiddenStates
from sametoken.state.inputs import StepInputs
from sametoken.state.kv_cache import KVCache
from sametoken.state.padded import (
    FixedLayout,
    Judgement,
    PaddedInputs,
    PaddedLengths,
    judge_and_commit,
    publish,
    stage_chunks,
    stage_windows,
)
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences

#: Rows of the plan as it is uploaded: slot, draft_limit or num_query, live or samples, step_id.
PLAN_FIELDS = 4


class PaddedJudge(Protocol):
    """Judges windows and makes accepted tokens true; ``kernels.commit.judge_and_commit``."""

    def __call__(
        self, sequences: Sequences, keys: Tensor, x: PaddedInputs, rows_per_window: int, /
    ) -> tuple[Judgement, PaddedLengths]:
        """The verdict on [B * W, tiles] keys, and the lengths after its commit."""
        ...


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """Stage, run, judge, commit and propose without a shape that depends on data.

    ``plan`` is [4, B] int64 on the device; padding holds the reserved slot and zeros. The
    outcome is [B, 4 + window] int64, as ``runner.outcome`` lays it out, with the step id of
    the plan that was really read.
    """

    sequences: Sequences
    model: CausalLM
    kv: KVCache
    table: SamplingTable
    drafter: Drafter
    judge: PaddedJudge = judge_and_commit
    parallel: TensorParallel = ALONE

    def serves(self, admission: Admission) -> bool:
        """Whether these verbs do all that a request asks for; if not, it takes the eager ones."""
        cut_elsewhere = admission.params.has_cuts and not self._has_whole_rows
        return not (needs_processing(admission) or cut_elsewhere)

    def layout(self, batch: int, chunk: int) -> FixedLayout:
        """The index tensors of a bucket, made before it is captured.

        Args:
            batch: plan rows.
            chunk: rows of each chunk; 0 for windows.
        """
        width = 1 if chunk else self.sequences.max_num_drafts + 1
        return FixedLayout.of(batch, chunk or width, width, self.sequences.device)

    def windows(self, plan: Tensor, layout: FixedLayout) -> Tensor:
        """A window of every decoding slot of the plan."""
        slots, draft_limit, live, step_id = plan.unbind(0)
        width = self.sequences.max_num_drafts + 1
        x = stage_windows(self.sequences, slots, draft_limit, live, width)
        hidden = self.model.forward(x.token_ids, x.rows, self.kv)
        logits = self.model.compute_rank_logits(hidden.last)
        keys = self._keys(logits, x.rows.slots, x.rows.positions)
        return self._settle(layout.inputs(x), x, hidden, keys, step_id)

    def chunks(self, plan: Tensor, layout: FixedLayout, rows: int) -> Tensor:
        """A prefill chunk of at most ``rows`` tokens of every slot of the plan."""
        slots, num_query, samples, step_id = plan.unbind(0)
        x = stage_chunks(self.sequences, slots, num_query, samples, rows)
        hidden = self.model.forward(x.token_ids, x.rows, self.kv)
        judged = layout.row_starts[:-1] + (x.num_query - 1).clamp(min=0)
        keys = self._keys(
            self.model.compute_rank_logits(hidden.last.index_select(0, judged)),
            x.rows.slots.index_select(0, judged),
            x.rows.positions.index_select(0, judged),
        )
        return self._settle(layout.inputs(x), x, hidden, keys, step_id)

    def _keys(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """[L, tiles] keys of all tokens; each rank makes those of its own columns, ``logits``."""
        if self._has_whole_rows:
            truncate(logits, slots, self.table.cuts)
        first_id = self.parallel.rank * logits.shape[1]
        keys = window_keys(
            logits, self.table.temperature, self.table.seed, slots, positions, first_id
        )
        return gather_columns(self.parallel, keys)

    @property
    def _has_whole_rows(self) -> bool:
        """Whether a row's logits can be compared here: of several ranks each has some columns."""
        return self.parallel.size == 1

    def _settle(
        self,
        inputs: StepInputs,
        x: PaddedInputs,
        hidden: HiddenStates,
        keys: Tensor,
        step_id: Tensor,
    ) -> Tensor:
        """Judge, commit and, with k above 0, propose; returns the outcome."""
        window = keys.shape[0] // x.slots.shape[0]
        verdict, lengths = self.judge(self.sequences, keys, x, window)
        outcome = pack(
            step_id, x.num_drafts, verdict.num_accepted, verdict.poisoned, verdict.tokens
        )
        if self.sequences.max_num_drafts:
            self._propose(inputs, x, hidden, lengths)
        return outcome

    def _propose(
        self, inputs: StepInputs, x: PaddedInputs, hidden: HiddenStates, lengths: PaddedLengths
    ) -> None:
        context = PaddedDraftContext(
            inputs,
            hidden,
            x.num_computed,
            lengths.num_computed,
            lengths.num_tokens,
            self.sequences,
        )
        drafts = self.drafter.propose(context)
        publish(self.sequences, x, drafts.draft_ids, drafts.num_drafts)


def needs_processing(admission: Admission) -> bool:
    """Whether a request's logits change before they are cut and divided by its temperature."""
    params = admission.params
    return (
        params.has_penalties
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(admission.bad_words_token_ids)
        or admission.grammar is not None
        or params.min_tokens > 0
        or params.logprobs is not None
        or params.prompt_logprobs is not None
    )

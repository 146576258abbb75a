"""The seven verbs at fixed shapes: what two CUDA graphs hold, cut at the logits."""

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
class Computed:
    """What the first half of a step leaves for the second: L logits rows of the target.

    Attributes:
        x: the step's inputs.
        hidden: of its flat rows.
        slots, positions, token_ids: [L] int64, of the flat rows whose logits these are.
        logits: [L, V] fp32; of several ranks each has its own columns.
    """

    x: PaddedInputs
    hidden: HiddenStates
    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Settled:
    """What the second half leaves for the host.

    Attributes:
        outcome: [B, 4 + W] int64, as ``runner.outcome`` lays it out, with the step id of the
            plan that was really read.
        tokens: [B, W] int64, as in ``Judgement``.
    """

    outcome: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """The verbs of a step without a shape that depends on data, in two halves.

    The first stages the inputs and runs the target up to its logits, the second judges,
    commits and proposes; what requests ask of their logits is done between them. ``plan`` is
    [4, B] int64 on the device; padding holds the reserved slot and zeros.
    """

    sequences: Sequences
    model: CausalLM
    kv: KVCache
    table: SamplingTable
    drafter: Drafter
    judge: PaddedJudge = judge_and_commit
    parallel: TensorParallel = ALONE

    def serves(self, admission: Admission) -> bool:
        """Whether these verbs do all that a request asks for; if not, it takes the eager ones.

        Of several ranks each holds a part of every row of logits.
        """
        params = admission.params
        needs_whole_rows = (
            params.changes_logits
            or params.reports_logprobs
            or params.has_cuts
            or admission.grammar is not None
        )
        return self._has_whole_rows or not needs_whole_rows

    def layout(self, batch: int, chunk: int) -> FixedLayout:
        """The index tensors of a bucket, made before it is captured.

        Args:
            batch: plan rows.
            chunk: rows of each chunk; 0 for windows.
        """
        width = 1 if chunk else self.sequences.max_num_drafts + 1
        return FixedLayout.of(batch, chunk or width, width, self.sequences.device)

    def windows(self, plan: Tensor) -> Computed:
        """The first half of a window of every decoding slot of the plan."""
        slots, draft_limit, live, _ = plan.unbind(0)
        width = self.sequences.max_num_drafts + 1
        x = stage_windows(self.sequences, slots, draft_limit, live, width)
        hidden = self.model.forward(x.token_ids, x.rows, self.kv)
        rows = x.rows
        logits = self.model.compute_rank_logits(hidden.last)
        return Computed(x, hidden, rows.slots, rows.positions, x.token_ids, logits)

    def chunks(self, plan: Tensor, layout: FixedLayout, rows: int) -> Computed:
        """The first half of a prefill chunk of at most ``rows`` tokens of every slot."""
        slots, num_query, samples, _ = plan.unbind(0)
        x = stage_chunks(self.sequences, slots, num_query, samples, rows)
        hidden = self.model.forward(x.token_ids, x.rows, self.kv)
        judged = layout.row_starts[:-1] + (x.num_query - 1).clamp(min=0)
        logits = self.model.compute_rank_logits(hidden.last.index_select(0, judged))
        of_rows = (x.rows.slots, x.rows.positions, x.token_ids)
        slots, positions, token_ids = (one.index_select(0, judged) for one in of_rows)
        return Computed(x, hidden, slots, positions, token_ids, logits)

    def settle(self, plan: Tensor, layout: FixedLayout, computed: Computed) -> Settled:
        """The second half: judge, commit and, with k above 0, propose."""
        x = computed.x
        keys = self._keys(computed.logits, computed.slots, computed.positions)
        window = keys.shape[0] // x.slots.shape[0]
        verdict, lengths = self.judge(self.sequences, keys, x, window)
        outcome = pack(plan[3], x.num_drafts, verdict.num_accepted, verdict.faults, verdict.tokens)
        if self.sequences.max_num_drafts:
            self._propose(layout.inputs(x), x, computed.hidden, lengths)
        return Settled(outcome, verdict.tokens)

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

"""One step: the same functions on every device, run eagerly or captured in two graphs.

Synthetic acceptance, for timing only: a step computes logits and chooses tokens as usual, but
``StepOps.verify`` draws which drafts are accepted, so the emitted text is meaningless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter
from sametoken.drafters.context import DraftContext
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.base import CausalLM, HiddenStates
from sametoken.ops.backend import FastPrompts, Kernels
from sametoken.ops.step.types import Chances, LayoutTable, StepInputs, StepOps, VerifyResult
from sametoken.state.caches import ModelCache
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.types.fast_prompts import NO_FAST_FORM, FastForm


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Output of a step's first half, input of the second.

    Attributes:
        x: the step's inputs.
        hidden: hidden states of all T rows, or of ``x.kept`` after the last layer.
        logits: [L, V] fp32 of the sampled rows; may be changed in place.
    """

    x: StepInputs
    hidden: HiddenStates
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """A step in two halves, split at the logits for logits processing.

    Attributes:
        sequences: device state of the slots.
        model, kv: the target and its cache.
        kernels, ops: operations of models and of steps.
        table: sampling parameters by slot.
        drafter: proposes drafts.
        results: [R, NUM_COUNTS + k + 1] int64, host memory for results.
        all_states: whether a drafter reads the last layer's states of all rows, or a recorder.
        fast_form: of the target's prompts.
        chances: synthetic acceptance; None: drafts are verified.
        parallel: the ranks that share the model.
    """

    sequences: Sequences
    model: CausalLM
    kv: ModelCache
    kernels: Kernels
    ops: StepOps
    table: SamplingTable
    drafter: Drafter
    results: Tensor
    all_states: bool = False
    fast_form: FastForm = NO_FAST_FORM
    chances: Chances | None = None
    parallel: TensorParallel = SINGLE_RANK

    def forward(self, layout: LayoutTable) -> ForwardOutput:
        """Run all rows of the step and compute the logits of the sampled ones."""
        x = self.ops.prepare_inputs(self.sequences, layout)
        rows = x.rows
        if self.fast_form.least_len:
            fast = FastPrompts(self.sequences.prompt_len, self.fast_form.least_len)
            rows = replace(rows, fast_prompts=fast)
        rows = layout.with_expanded(rows, self.sequences.block_size)
        hidden = self.model.forward(x.token_ids, rows, self.kv, x.kept)
        sampled = hidden.last
        if x.kept is None:
            sampled = self.kernels.take_rows(sampled, x.sampled.index)
        return ForwardOutput(x, hidden, self.model.compute_logits(sampled))

    def verify_and_propose(self, output: ForwardOutput, wanted: int | None = None) -> VerifyResult:
        """Verify, commit, deliver the result to the host, propose as many drafts as are wanted."""
        x, sequences = output.x, self.sequences
        verified = self._verify(output)
        lengths = self.ops.commit(sequences, x, verified.num_accepted, verified.next_token)
        # Enqueued before drafting; the host waits for the end of the step all the same.
        self.ops.deliver(x, verified, self.results)
        context = DraftContext(
            x=x,
            hidden=output.hidden,
            end=lengths.num_computed,
            num_tokens=lengths.num_tokens,
            num_wanted=x.num_speculative_tokens if wanted is None else wanted,
            sequences=sequences,
            kernels=self.kernels,
            ops=self.ops,
        )
        drafts = self.drafter.propose(context)
        self.ops.publish(sequences, x, drafts.draft_ids, drafts.num_drafts)
        return verified

    def _verify(self, output: ForwardOutput) -> VerifyResult:
        """Verify the windows; with several ranks, rank 0's result is broadcast."""
        x, logits, table = output.x, output.logits, self.table
        self.kernels.truncate(logits, x.sampled.slots, table.truncation)
        keys = self.kernels.token_keys(logits, table.temperature, table.seed, x.sampled)
        verified = self.ops.verify(keys, x, self.chances)
        if self.parallel.size == 1:
            return verified
        decided = torch.stack((verified.num_accepted, verified.next_token))
        num_accepted, next_token = self.parallel.broadcast(decided).unbind(0)
        return replace(verified, num_accepted=num_accepted, next_token=next_token)

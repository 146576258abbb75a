"""One step: the same functions on every device, called one by one or captured in two graphs.

Synthetic acceptance: drafts accepted by chance at given rates, to measure times alone.

The target's logits are computed and its tokens chosen as ever, so that a step takes the time
it takes; but which drafts are accepted is drawn (``StepOps.verify``), and what is emitted means
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter
from sametoken.drafters.context import DraftContext
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.base import CausalLM, HiddenStates
from sametoken.ops.backend import Kernels
from sametoken.ops.step.types import (
    Chances,
    LayoutTable,
    StepInputs,
    StepOps,
    VerifyResult,
)
from sametoken.state.caches import ModelCache
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences


def conditional_rates(unconditional: Sequence[float], device: torch.device) -> Tensor:
    """[k] fp32: how often draft i is accepted if all before it are. Made once, on start-up.

    Args:
        unconditional: k rates from 0 to 1, none above the one before it: how often draft i
            and all before it are accepted (``SpeculativeConfig.synthetic_rates``).
        device: where steps run.
    """
    before = (1.0, *unconditional)
    rates = [
        rate / last if last else 0.0 for rate, last in zip(unconditional, before, strict=False)
    ]
    return torch.tensor(rates, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What the first half of a step leaves for the second.

    Attributes:
        x: the step's inputs.
        hidden: of all T rows.
        logits: [L, V] fp32, of the sampled rows; may be changed in place.
    """

    x: StepInputs
    hidden: HiddenStates
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """A step in two halves, cut at the logits: what requests ask of them is done in between.

    Attributes:
        sequences: the device's truth.
        model, kv: the target and its KV memory.
        kernels, ops: operations of models and of steps.
        table: sampling parameters by slot.
        drafter: makes drafts.
        results: [R, NUM_COUNTS + k + 1] int64, the host's memory for results.
        chances: of synthetic acceptance; None: drafts are verified.
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
    chances: Chances | None = None
    parallel: TensorParallel = SINGLE_RANK

    def forward(self, layout: LayoutTable) -> ForwardOutput:
        """One pass over all rows of the step, and the logits of those that are sampled."""
        x = self.ops.prepare_inputs(self.sequences, layout)
        hidden = self.model.forward(x.token_ids, x.rows, self.kv)
        sampled = self.kernels.take_rows(hidden.last, x.sampled.index)
        return ForwardOutput(x, hidden, self.model.compute_logits(sampled))

    def verify_and_propose(self, computed: ForwardOutput) -> VerifyResult:
        """Verify, commit, deliver the result to the host, propose."""
        x, sequences = computed.x, self.sequences
        verdict = self._verify(computed)
        lengths = self.ops.commit(sequences, x, verdict.num_accepted, verdict.next_token)
        # The result leaves before drafting, so that the host waits for the verdict alone.
        self.ops.deliver(x, verdict, self.results)
        context = DraftContext(
            x=x,
            hidden=computed.hidden,
            end=lengths.num_computed,
            num_tokens=lengths.num_tokens,
            sequences=sequences,
            kernels=self.kernels,
            ops=self.ops,
        )
        drafts = self.drafter.propose(context)
        self.ops.publish(sequences, x, drafts.draft_ids, drafts.num_drafts)
        return verdict

    def _verify(self, computed: ForwardOutput) -> VerifyResult:
        """Judge the windows; of several ranks, rank 0 decides for all."""
        x, logits, table = computed.x, computed.logits, self.table
        self.kernels.truncate(logits, x.sampled.slots, table.truncation)
        keys = self.kernels.token_keys(logits, table.temperature, table.seed, x.sampled)
        verdict = self.ops.verify(keys, x, self.chances)
        if self.parallel.size == 1:
            return verdict
        decided = torch.stack((verdict.num_accepted, verdict.next_token))
        num_accepted, next_token = self.parallel.broadcast(decided).unbind(0)
        return replace(verdict, num_accepted=num_accepted, next_token=next_token)

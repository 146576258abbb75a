"""One step: seven verbs, the same on every device, synchronous or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sametoken.core.plan import StepPlan
from sametoken.drafters.base import Drafter
from sametoken.drafters.context import DraftContext
from sametoken.models.base import CausalLM
from sametoken.runner.async_output import HostBuffer, OutputRing, PendingOutput
from sametoken.runner.launch import Launcher
from sametoken.runner.outcome import pack
from sametoken.runner.stream import Stream
from sametoken.runner.swap import SwapStore
from sametoken.state.commit import admit, assign_blocks, commit, publish
from sametoken.state.history import NO_HISTORY, TokenHistory
from sametoken.state.inputs import stage
from sametoken.state.kv_cache import KVCache
from sametoken.state.sequences import Sequences
from sametoken.verification.base import Verifier


class Runner(Protocol):
    """Runs plans on the device in the order they are submitted."""

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step; its result is read later from the returned output."""
        ...


@dataclass(frozen=True, slots=True)
class StepRunner:
    """Runs plans on the device in the order they are submitted.

    Attributes:
        sequences: the device's truth.
        model, kv: the target and its KV memory.
        verifier: judges drafts.
        drafter: makes them.
        launcher: runs the target on staged inputs.
        swap: KV of preempted requests.
        stream: what the work is enqueued on.
        ring: host memory for results.
        history: texts of earlier requests, for drafters that read them.
    """

    sequences: Sequences
    model: CausalLM
    kv: KVCache
    verifier: Verifier
    drafter: Drafter
    launcher: Launcher
    swap: SwapStore
    stream: Stream
    ring: OutputRing
    history: TokenHistory = NO_HISTORY

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step; its result is read later from the returned output."""
        buffer = self.ring.acquire()
        landed = self.stream.submit(lambda: self._run(plan, buffer))
        return PendingOutput(plan, tuple(range(len(plan.rows))), buffer, landed, self.ring)

    def _run(self, plan: StepPlan, buffer: HostBuffer) -> None:
        self.take_up(plan)
        if plan.rows:
            self.run_rows(plan, buffer)

    def run_rows(self, plan: StepPlan, buffer: HostBuffer, first: int = 0) -> None:
        """The seven verbs for a plan's rows; the verdict goes to ``buffer`` from ``first`` on."""
        x = stage(self.sequences, plan)
        launch = self.launcher.load(plan, x)
        hidden = launch.run(self.model, self.kv)
        logits = self.model.compute_logits(hidden.last[x.logits_indices])
        verdict = self.verifier.judge(logits, x)
        prompt_logprobs = self.verifier.score_prompt(hidden.last, x, self.model.compute_logits)
        committed = commit(self.sequences, x, verdict.num_accepted, verdict.next_token)
        # The copy starts before drafting, so that the host waits for the verdict alone.
        buffer.copy_from(pack(x, verdict, self.sequences.max_num_drafts + 1), first)
        buffer.keep(len(plan.rows), first, verdict.logprobs, prompt_logprobs)
        drafts = self.drafter.propose(
            DraftContext(
                x, hidden, x.num_computed, committed.num_computed, committed.num_tokens,
                self.sequences,
            )
        )  # fmt: skip
        publish(self.sequences, x, drafts.draft_ids, drafts.num_drafts)

    def take_up(self, plan: StepPlan) -> None:
        """Apply what a plan changes before its rows run, in the order of its fields."""
        self.swap.move_out(plan)
        for admission in plan.admissions:
            self.history.keep(self.sequences, admission.slot)
            admit(self.sequences, admission)
            self.verifier.admit(admission)
        for assignment in plan.block_assignments:
            assign_blocks(self.sequences, assignment)
        self.swap.move_in(plan)

"""From plans to steps on the device, in the order they are submitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sametoken.ops.step.types import LayoutTable
from sametoken.runner.async_output import HostBuffer, OutputRing, PendingOutput
from sametoken.runner.logits_processing import (
    Between,
    LogitsProcessing,
)
from sametoken.runner.step import Step
from sametoken.runner.stream import Stream
from sametoken.runner.swap import SwapStore
from sametoken.state.commit import admit, assign_blocks
from sametoken.state.sequences import (
    NO_HISTORY,
    TokenHistory,
)
from sametoken.state.upload import upload
from sametoken.types.layout import (
    NO_REQUESTS,
    StepLayout,
    StepShape,
    padded,
)
from sametoken.types.plan import StepPlan


class Runner(Protocol):
    """Runs plans on the device in the order they are submitted."""

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step; its result is read later from the returned output."""
        ...


class Launcher(Protocol):
    """Runs the two halves of a step, and in between what its requests ask of their logits."""

    def run(self, layout: StepLayout, first_place: int, between: Between) -> None:
        """Enqueue a step.

        Args:
            layout: where its rows lie.
            first_place: where its results begin among the host's.
            between: what its requests ask.
        """
        ...


@dataclass(frozen=True, slots=True)
class EagerLauncher:
    """Calls the functions of a step one by one: the CPU's way, and that of large steps on a GPU.

    Attributes:
        step: the functions.
        row_multiple: rows, and requests, are padded to a multiple of it; 1 pads nothing.
    """

    step: Step
    row_multiple: int = 1

    def run(self, layout: StepLayout, first_place: int, between: Between) -> None:
        """See ``Launcher.run``."""
        sequences, shape = self.step.sequences, self._padded(layout.shape)
        columns = layout.table(shape, sequences.reserved_slot, first_place)
        table = LayoutTable(upload(columns, sequences.device), shape)
        between.look()
        computed = self.step.forward(table)
        between.process(computed)
        between.score(self.step.verify_and_propose(computed).tokens)

    def warm_up(self, num_rows: int) -> None:
        """Compile what steps of this size need, by one that is all padding."""
        sequences = self.step.sequences
        shape = StepShape(2, num_rows, 1, 1, sequences.num_speculative_tokens + 1, num_rows)
        table = NO_REQUESTS.table(shape, sequences.reserved_slot, 0)
        self.step.verify_and_propose(
            self.step.forward(LayoutTable(upload(table, sequences.device), shape))
        )

    def _padded(self, shape: StepShape) -> StepShape:
        return shape if self.row_multiple == 1 else padded(shape, self.row_multiple)


@dataclass(frozen=True, slots=True)
class StepRunner:
    """Runs plans on the device in the order they are submitted.

    Attributes:
        step: the functions of a step.
        processing: what requests ask of their logits.
        launcher: runs the step.
        swap: KV of preempted requests.
        stream: what the work is enqueued on.
        ring: host memory for results.
        history: texts of earlier requests, for drafters that read them.
    """

    step: Step
    processing: LogitsProcessing
    launcher: Launcher
    swap: SwapStore
    stream: Stream
    ring: OutputRing
    history: TokenHistory = NO_HISTORY

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step; its result is read later from the returned output."""
        buffer = self.ring.acquire()
        landed = self.stream.submit(lambda: self._run(plan, buffer))
        return PendingOutput(plan, buffer, landed, self.ring)

    def _run(self, plan: StepPlan, buffer: HostBuffer) -> None:
        self._take_up(plan)
        if not plan.requests:
            return
        slots = [row.slot for row in plan.requests]
        layout = StepLayout.of(plan, self.step.ops.known_drafts(self.step.sequences, slots))
        between = self.processing.of_step(layout, buffer)
        self.launcher.run(layout, buffer.first_place, between)

    def _take_up(self, plan: StepPlan) -> None:
        """Apply what a plan changes before its rows run, in the order of its fields."""
        sequences = self.step.sequences
        self.swap.move_out(plan)
        for admission in plan.admissions:
            self.history.keep(sequences, admission.slot)
            admit(sequences, admission)
            self.processing.admit(admission)
        for assignment in plan.block_assignments:
            assign_blocks(sequences, assignment)
        self.swap.move_in(plan)

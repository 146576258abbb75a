"""``StepRunner`` applies plans and launches their steps in submission order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sametoken.ops.step.types import LayoutTable, TableWrite
from sametoken.runner.adapters import NO_STEP_ADAPTERS, StepAdapters
from sametoken.runner.async_output import HostBuffer, OutputRing, PendingOutput
from sametoken.runner.kept_states import KeptStateStore
from sametoken.runner.logits_processing import LogitsProcessing, StepLogitsProcessor
from sametoken.runner.routed_experts import NO_RECORDER, Recorder
from sametoken.runner.step import Step
from sametoken.runner.stream import Stream
from sametoken.runner.swap import SwapStore
from sametoken.state.sequences import NO_HISTORY, TokenHistory
from sametoken.state.slots import admit, assign_blocks, restart
from sametoken.state.upload import upload
from sametoken.types.layout import NO_REQUESTS, StepLayout, StepShape, padded
from sametoken.types.plan import StepPlan


class Runner(Protocol):
    """Runs plans on the device in submission order."""

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step; its result is read later from the returned output."""
        ...


class Launcher(Protocol):
    """Runs the two halves of a step with logits processing in between."""

    @property
    def step(self) -> Step:
        """The step's functions."""

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """Captured shapes: a step is padded to the first that holds it, if one does."""

    def run(self, layout: StepLayout, first_place: int, processor: StepLogitsProcessor) -> None:
        """Enqueue a step.

        Args:
            layout: the rows of the step.
            first_place: index of its first result row on the host.
            processor: its logits processing.
        """
        ...


@dataclass(frozen=True, slots=True)
class EagerLauncher:
    """Eager mode: the CPU's steps, and steps too large for a captured graph.

    Attributes:
        step: the step's functions.
        row_multiple: rows and requests are padded to a multiple of it; 1 pads nothing.
        shapes: none is captured.
    """

    step: Step
    row_multiple: int = 1
    shapes: tuple[StepShape, ...] = ()

    def run(self, layout: StepLayout, first_place: int, processor: StepLogitsProcessor) -> None:
        """See ``Launcher.run``."""
        table = self._upload(layout, self._padded(layout.shape), first_place)
        processor.start_masks()
        output = self.step.forward(table)
        processor.process(output)
        processor.gather_logprobs(self.step.verify_and_propose(output, layout.num_wanted).tokens)

    def warm_up(self, num_rows: int) -> None:
        """Compile the kernels for steps of this size by running one of padding only."""
        window = self.step.sequences.num_speculative_tokens + 1
        shape = StepShape(2, num_rows, 1, 1, window, num_rows, self.step.all_states)
        self.run_padding(self._padded(shape))

    def run_padding(self, shape: StepShape) -> None:
        """Run a step of padding only."""
        self.step.verify_and_propose(self.step.forward(self._upload(NO_REQUESTS, shape, 0)))

    def _upload(self, layout: StepLayout, shape: StepShape, first_place: int) -> LayoutTable:
        sequences = self.step.sequences
        table = layout.table(shape, sequences.reserved_slot, first_place)
        return LayoutTable(upload(table, sequences.device), shape)

    def _padded(self, shape: StepShape) -> StepShape:
        # Tests have static shapes here (tests/helpers/static_steps.py).
        return padded(shape, self.row_multiple)


@dataclass(frozen=True, slots=True)
class StepRunner:
    """``Runner`` of the engine: applies a plan, then launches its step.

    Attributes:
        step: the step's functions.
        processing: logits processing of the slots.
        launcher: runs the step.
        swap: host memory for preempted requests' blocks.
        kept_states: recurrent states of prefixes.
        stream: the stream that work is enqueued on.
        ring: host buffers for results.
        history: texts of earlier requests, for drafters that read them.
        experts: copies what the step's ``model`` has recorded to the results.
        adapters: of the slots' requests.
    """

    step: Step
    processing: LogitsProcessing
    launcher: Launcher
    swap: SwapStore
    kept_states: KeptStateStore
    stream: Stream
    ring: OutputRing
    history: TokenHistory = NO_HISTORY
    experts: Recorder = NO_RECORDER
    adapters: StepAdapters = NO_STEP_ADAPTERS

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step; its result is read later from the returned output."""
        buffer = self.ring.acquire()
        landed = self.stream.submit(lambda: self._run(plan, buffer))
        return PendingOutput(plan, buffer, landed, self.ring)

    @torch.inference_mode()  # Autograd would note every operation.
    def _run(self, plan: StepPlan, buffer: HostBuffer) -> None:
        self._apply(plan)
        if not plan.requests:
            return
        slots = [scheduled.slot for scheduled in plan.requests]
        launcher = self.adapters.launcher_of(plan, self.launcher)
        layout = StepLayout.of(
            plan,
            self.step.ops.known_drafts(self.step.sequences, slots),
            all_states=launcher.step.all_states or self.processing.scores_prompts(plan),
        )
        launcher.run(layout, buffer.first_place, self.processing.of_step(layout, buffer))
        buffer.experts = self.experts.keep(plan, layout)
        self.kept_states.keep(plan, self.step.sequences.num_computed)

    def _apply(self, plan: StepPlan) -> None:
        """Apply a plan's state changes before its rows run, in the order of its fields."""
        self.swap.move_out(plan)
        for admission in plan.admissions:
            self.history.keep(self.step.sequences, admission.slot)
        self.step.ops.write_tables(self._writes(plan))
        self.swap.move_in(plan)
        self.kept_states.restore(plan)

    def _writes(self, plan: StepPlan) -> list[TableWrite]:
        sequences = self.step.sequences
        writes = [restart(sequences, slot) for slot in plan.restarts]
        for admission in plan.admissions:
            writes += admit(sequences, admission) + self.processing.admit(admission)
            writes += self.adapters.admit(admission)
        return writes + [assign_blocks(sequences, one) for one in plan.block_assignments]

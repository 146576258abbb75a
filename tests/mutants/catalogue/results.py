"""Results on their way to the host, and what is returned or extracted of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mutants.catalogue.planting import KERNELS, LAW, STATIC, in_every_program, instead_of, mutant
from mutants.catalogue.shared_tests import ACCEPTANCE, FEW
from sametoken.extraction.writer import StateWriter, _Sequence
from sametoken.runner import async_output
from sametoken.runner.async_output import HostBuffer, OutputRing, PendingOutput
from sametoken.runner.routed_experts import RecordingKernels, StepExperts

TRAINED_COPY = "tests/regression/test_vllm_38556.py::test_so_they_do_over_a_trained_nemotron"
COPY_IN_FLIGHT = (
    "tests/regression/test_vllm_38556.py"
    "::test_requests_come_and_go_while_results_are_on_their_way[late]"
)
EXPERTS = (
    "tests/e2e/test_routed_experts.py"
    "::test_rows_of_padding_and_of_rejected_drafts_are_not_among_them[static-1]"
)
EXTRACTED = (
    "tests/unit/extraction/test_writer.py"
    "::test_rows_of_kept_tokens_are_written_and_rows_past_the_end_are_not"
)


@mutant("host-copy-read-in-flight", "vllm#38556", f"{ACCEPTANCE}[self-3-late-0.0]", "guard")
@mutant("host-copy-read-in-flight-of-a-hybrid", "vllm#38556", COPY_IN_FLIGHT, "guard")
def copy_is_read_in_flight(patch: pytest.MonkeyPatch) -> None:
    def read_at_once(self: PendingOutput) -> Any:
        result = self.buffer.read(self.plan)
        self.ring.release(self.buffer)
        return result

    patch.setattr(PendingOutput, "wait", read_at_once)


@mutant("host-copy-read-in-flight-unchecked", "vllm#38556", f"{FEW}[right]", "tokens", STATIC)
@mutant("host-copy-read-in-flight-of-a-hybrid-unchecked", "vllm#38556", COPY_IN_FLIGHT, "tokens")
@mutant("host-copy-read-in-flight-of-a-trained-nemotron", "vllm#38556", TRAINED_COPY, "tokens")
def copy_is_read_in_flight_unchecked(patch: pytest.MonkeyPatch) -> None:
    """A buffer then holds zeros, or what an earlier step left in it."""
    copy_is_read_in_flight(patch)
    patch.setattr(async_output, "NOT_LANDED", 0)
    patch.setattr(HostBuffer, "clear", lambda self: None)

    @instead_of(patch, HostBuffer, "read")
    def mutant(read, self, plan):
        with pytest.MonkeyPatch.context() as unchecked:
            unchecked.setattr(async_output, "_require_result_of", lambda step_id, found: None)
            return read(self, plan)


@mutant("one-host-buffer-for-all-steps", "vllm#38556", f"{ACCEPTANCE}[self-3-ahead-0.0]", "guard")
def all_steps_share_a_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutputRing, "acquire", lambda self: self.free[0])
    patch.setattr(OutputRing, "release", lambda self, buffer: None)


@mutant("windows-of-another-layout", "vllm#38311", f"{FEW}[mixed]", "tokens", KERNELS)
def windows_of_another_layout_are_delivered(patch: pytest.MonkeyPatch) -> None:
    """What is right on the device is told from where an earlier step's windows lay."""
    kept: dict[int, torch.Tensor] = {}

    @in_every_program(patch, "deliver")
    def mutant(deliver, x, verdict, results):
        starts = kept.setdefault(len(x.slots), x.window_starts.clone())
        inside = starts.clamp(max=max(len(verdict.tokens) - 1, 0))
        deliver(replace(x, window_starts=inside), verdict, results)


@mutant("experts-of-rejected-drafts-returned", LAW, EXPERTS, "position")
def experts_of_all_rows_are_returned(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, StepExperts, "of")
    def mutant(of, self, index, scheduled, num_accepted):
        return of(self, index, scheduled, scheduled.draft_limit)


@mutant("experts-of-a-layer-s-slices-mixed", LAW, EXPERTS, "position")
def every_slice_of_a_layer_is_its_first(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, RecordingKernels, "_next")
    def mutant(next_part, self, num_rows):
        layer = self._num_filled // len(self._layers[0])
        next_part(self, num_rows)
        return self._layers[layer][:num_rows]


@mutant("rows-past-the-end-extracted", LAW, EXTRACTED, "position")
def rows_past_the_end_are_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Sequence, "cut", lambda self, num_rows: None)


@mutant("rows-in-flight-extracted", LAW, EXTRACTED, "guard")
def rows_in_flight_are_recorded(patch: pytest.MonkeyPatch) -> None:
    """Those that steps in flight bring after a request has ended."""

    @instead_of(patch, StateWriter, "_add")
    def mutant(add, self, sequence, *rows):
        sequence.ended = False
        add(self, sequence, *rows)

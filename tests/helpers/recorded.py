"""What a step computes, kept for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch

from sametoken.ops.step.types import StepInputs, VerifyResult
from sametoken.runner.runner import StepRunner
from sametoken.runner.step import Step

#: The inputs of a step, the raw logits of its sampled rows, and what was decided.
Note = Callable[[StepInputs, torch.Tensor, VerifyResult], None]


def noted(step: Step, note: Note) -> Step:
    """The step, which tells ``note`` what it did."""

    class Noted(type(step)):
        def forward(self, layout):
            computed = super().forward(layout)
            raw.append(computed.logits.clone())
            return computed

        def verify_and_propose(self, computed, num_wanted=None):
            verified = super().verify_and_propose(computed, num_wanted)
            note(computed.x, raw.pop(), verified)
            return verified

    raw: list[torch.Tensor] = []
    return Noted(**{field.name: getattr(step, field.name) for field in fields(step)})


def emitted_rows(x: StepInputs, verified: VerifyResult):
    """Of every emitted token its request's slot, its position, and its sampled row."""
    for b, slot in enumerate(x.slots.tolist()):
        if bool(x.samples[b]):
            for r in range(int(verified.num_accepted[b]) + 1):
                yield slot, int(x.num_tokens[b]) + r, int(x.window_starts[b]) + r


class RecordedLogits:
    """Keeps the raw logits of every emitted token by prompt and position."""

    def __init__(self) -> None:
        self.rows: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}

    def runner(self, runner: StepRunner) -> StepRunner:
        """The runner of an eager engine, recorded."""
        step = noted(runner.step, self._note)
        launcher = replace(runner.launcher, step=step)
        return replace(
            runner, step=step, launcher=launcher, processing=watched(runner.processing, self._admit)
        )

    def _admit(self, admission) -> None:
        self.prompts[admission.slot] = admission.prompt_token_ids

    def _note(self, x, raw, verified) -> None:
        for slot, position, row in emitted_rows(x, verified):
            self.rows[self.prompts[slot], position] = raw[row]


def watched(processing, see):
    """Logits processing whose admissions are seen first."""

    class Watched(type(processing)):
        def admit(self, admission):
            see(admission)
            return super().admit(admission)

    return Watched(**{field.name: getattr(processing, field.name) for field in fields(processing)})

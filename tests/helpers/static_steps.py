"""The layouts in which tests run a step: compact, and of static shapes as graphs hold them."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from sametoken.models.base import HiddenStates
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.sampling import sample_triton as sampling
from sametoken.ops.sampling import truncation_triton as truncation_op
from sametoken.ops.step import native, reference
from sametoken.ops.step import triton as in_triton
from sametoken.runner.adapters import AdaptedSteps
from sametoken.runner.runner import EagerLauncher, StepRunner
from sametoken.runner.step import Step
from sametoken.types.layout import StepShape

#: compact: as a CPU engine; static: the reference in static shapes, dead rows poisoned; kernels:
#: the same by the Triton kernels of a step, under the interpreter.
STEPS = {"compact": native, "static": reference, "kernels": in_triton}

#: Names the one that tests without a choice of their own run.
CHOICE = "TEST_STEPS"


def chosen_steps() -> str:
    return os.environ.get(CHOICE, "compact")


class DeviceChoices(ReferenceKernels):
    """The reference, but tokens are cut and chosen by the kernels of captured steps."""

    def truncate(self, logits, slots, truncation) -> None:
        truncation_op.truncate(logits, slots, truncation)

    def sample(self, *arguments) -> torch.Tensor:
        return sampling.sample(*arguments)

    def token_keys(self, *arguments) -> torch.Tensor:
        return sampling.token_keys(*arguments)


class Poisoned:
    """A model whose dead rows end in NaN, and their logits."""

    def __init__(self, model, reserved_slot: int) -> None:
        self._model, self._reserved = model, reserved_slot

    def forward(self, token_ids, rows, kv, kept=None) -> HiddenStates:
        hidden = self._model.forward(token_ids, rows, kv, kept)
        last = self._without_dead(hidden.last, kept or rows)
        return HiddenStates(last, self._without_dead(hidden.auxiliary, rows))

    def _without_dead(self, states, rows):
        return states.masked_fill((rows.slots == self._reserved)[:, None], torch.nan)

    def compute_logits(self, hidden):
        dead = hidden.isnan().any(dim=1, keepdim=True)
        return self._model.compute_logits(hidden).masked_fill_(dead, torch.nan)


class StaticLauncher(EagerLauncher):
    """Requests, rows and sampled rows have room for more, as in a captured shape."""

    def run(self, layout, first_place, processor):
        super().run(layout, first_place, processor)
        sequences = self.step.sequences
        for fact in (sequences.num_tokens, sequences.num_computed, sequences.token_ids):
            assert not fact[sequences.reserved_slot].any(), "padding has committed"

    def _padded(self, shape):
        windows, chunks = shape.num_windows + 2, shape.num_chunks + (shape.num_chunks > 0)
        # Requests without rows begin behind the last row, or before some that are dead.
        rows = shape.num_rows + 3 * (shape.num_rows % 2)
        if shape.all_sampled and shape.max_window == 1:
            rows = windows
        return replace(
            shape,
            num_requests=windows + chunks,
            num_windows=windows,
            num_rows=rows,
            num_sampled=shape.num_sampled + 2 if shape.num_chunks else rows,
        )


def captured_shapes_of(kind: str, max_num_seqs: int, k: int) -> tuple[StepShape, ...]:
    """Steps of windows that the scheduler of static steps takes for captured."""
    if kind == "compact":
        return ()
    return tuple(
        StepShape(max_num_seqs, max_num_seqs * rows, max_num_seqs * rows, max_num_seqs, most, most)
        for rows, most in dict.fromkeys(((1, 1), (2, k + 1), (k + 1, k + 1)))
    )


def launcher_of(step: Step, kind: str) -> EagerLauncher:
    """What runs a step in one of ``STEPS``."""
    if kind == "compact":
        return EagerLauncher(step)
    poisoned = Poisoned(step.model, step.sequences.reserved_slot)
    return StaticLauncher(replace(step, model=poisoned))


def in_steps(runner: StepRunner, kind: str | None = None) -> StepRunner:
    """The runner of an engine as a user builds it, its steps in one of ``STEPS``."""
    kind = kind or chosen_steps()
    step, adapters = replace(runner.step, ops=STEPS[kind]), runner.adapters
    if isinstance(adapters, AdaptedSteps):
        own = replace(adapters.launcher.step, ops=STEPS[kind])
        adapters = replace(adapters, launcher=launcher_of(own, kind))
    return replace(runner, step=step, launcher=launcher_of(step, kind), adapters=adapters)

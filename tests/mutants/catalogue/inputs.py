"""Inputs of a step that are an earlier one's, or of other rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from mutants.catalogue.planting import KERNELS, LAW, STATIC, in_every_program, instead_of, mutant
from mutants.catalogue.shared_tests import FEW, FORMER_DRAFTS, SELF, WINDOW
from sametoken.drafters.context import DraftContext
from sametoken.engine import core
from sametoken.ops.step.types import LayoutTable, StepInputs
from sametoken.runner import runner
from sametoken.types.layout import DRAFT_LIMIT, PLACE, STEP_ID

STALE_METADATA = "tests/regression/test_vllm_38311.py::test_every_draft_position_is_accepted[1]"

AUTOCAST = (
    "tests/e2e/test_modes.py"
    "::test_what_an_engine_says_is_the_same_in_every_mode[llama-reference-autocast]"
)


def with_inputs(
    patch: pytest.MonkeyPatch, change: Callable[[StepInputs, LayoutTable], StepInputs]
) -> None:
    """Change the inputs of every step."""

    @in_every_program(patch, "prepare_inputs")
    def changed(prepare, sequences, layout):
        return change(prepare(sequences, layout), layout)


@mutant("another-row-kept-by-the-last-layer", LAW, WINDOW, "tokens")
@mutant("another-row-kept-in-static-shapes", LAW, WINDOW, "tokens", STATIC)
def kept_rows_are_one_too_early(patch: pytest.MonkeyPatch) -> None:
    def change(x, layout):
        kept = x.kept and replace(x.kept, index=(x.kept.index - 1).clamp(min=0))
        return replace(x, kept=kept)

    with_inputs(patch, change)


@mutant("stale-inputs-replayed", "vllm#38311", f"{FEW}[right]", "guard", STATIC)
@mutant(
    "stale-inputs-replayed-unchecked",
    "vllm#38311",
    f"{FEW}[right]",
    "position",
    KERNELS,
    checked=False,
)
def inputs_are_replayed(patch: pytest.MonkeyPatch, *, checked: bool = True) -> None:
    """As a graph does that keeps the tensors of the step it was captured in."""
    kept: dict[Any, StepInputs] = {}

    def replay(x, layout):
        former = replace(kept.setdefault(layout.shape, x), places=x.places)
        return former if checked else replace(former, step_ids=x.step_ids)

    with_inputs(patch, replay)


@mutant("stale-layout-replayed", "vllm#38311", f"{FEW}[right]", "guard", STATIC)
@mutant(
    "stale-layout-replayed-unchecked",
    "vllm#38311",
    f"{FEW}[right]",
    "tokens",
    checked=False,
)
def layouts_are_replayed(patch: pytest.MonkeyPatch, *, checked: bool = True) -> None:
    """Rows lie where those of an earlier step with as many rows did."""
    kept: dict[Any, torch.Tensor] = {}

    def mutant(table, shape):
        former = kept.setdefault(shape, table).clone()
        fresh = (PLACE,) if checked else (PLACE, STEP_ID)
        former[fresh, :] = table[fresh, :]
        return LayoutTable(former, shape)

    patch.setattr(runner, "LayoutTable", mutant)


@mutant("dead-rows-judged", LAW, f"{FEW}[empty]", "acceptance", STATIC)
def limits_are_taken_for_drafts(patch: pytest.MonkeyPatch) -> None:
    """A window has as many drafts as the layout has room for: dead rows are judged."""

    def judge_dead_rows(x, layout):
        return replace(x, num_drafts=layout.table[DRAFT_LIMIT, : len(x.samples)] * x.samples)

    with_inputs(patch, judge_dead_rows)


@mutant("count-of-drafts-of-a-former-request", "vllm#39273", FORMER_DRAFTS, "acceptance", STATIC)
def slots_tell_what_a_former_step_proposed(patch: pytest.MonkeyPatch) -> None:
    proposed: dict[int, int] = {}

    def former(x, layout):
        slots, now = x.slots.tolist(), x.num_proposed.tolist()
        before = [proposed.get(slot, count) for slot, count in zip(slots, now, strict=True)]
        proposed.update(zip(slots, now, strict=True))
        return replace(x, num_proposed=torch.tensor(before))

    with_inputs(patch, former)


@mutant("stale-attention-metadata-of-the-drafter", "vllm#38311", SELF, "acceptance", STATIC)
@mutant("stale-attention-metadata-of-an-mtp-module", "vllm#38311", STALE_METADATA, "acceptance")
def drafter_rows_are_replayed(patch: pytest.MonkeyPatch) -> None:
    """Positions and addresses of an earlier step with as many rows."""
    kept: dict[Any, Any] = {}

    def mutant(find, self, *chains):
        found = find(self, *chains)
        key = find.__name__, len(found.rows.slots)
        return replace(found, rows=kept.setdefault(key, found.rows))

    for name in ("catch_up", "catch_up_with_newest", "advanced"):
        instead_of(patch, DraftContext, name)(mutant)


@mutant("products-in-the-autocast-of-a-caller", LAW, AUTOCAST, "tokens")
def steps_run_in_the_modes_of_their_caller(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core, "without_modes", nullcontext)

"""What a mutant is, and the ways to plant one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from sametoken.ops.step import native, reference
from sametoken.ops.step import triton as in_triton
from sametoken.ops.step.types import StepInputs

LAW = "the law: one truth"
#: Layouts of steps (``helpers.static_steps``).
COMPACT, STATIC, KERNELS = "compact", "static", "kernels"
#: Those in one of which tests that use ``layouts`` run.
LAYOUTS = COMPACT, STATIC


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        issue: where it was met, or the part of the law that it breaks.
        test: the test that must fail.
        oracle: what catches it: "tokens"; "acceptance"; "position", a check of what one row
            reads (unwritten KV is poisoned); or "guard", a check of the engine itself.
        steps: the layout of steps in which the test runs. Compact and static ones share their
            code, except for the rows that drafters catch up on; kernels have their own.
        plant: makes the change.
    """

    name: str
    issue: str
    test: str
    oracle: str
    steps: str
    plant: Callable[[pytest.MonkeyPatch], None]


MUTANTS: list[Mutant] = []


def mutant(
    name: str, issue: str, test: str, oracle: str, steps: str = COMPACT, **options: Any
) -> Callable[[Callable], Callable]:
    """Enter what plants a bug, with these options, into the catalogue."""

    def enter(plant: Callable) -> Callable:
        MUTANTS.append(Mutant(name, issue, test, oracle, steps, partial(plant, **options)))
        return plant

    return enter


def instead_of(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Callable[[Callable], None]:
    """Put what is decorated in a function's place; it gets that function before its arguments."""
    original = getattr(owner, name)
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)

    def put(change: Callable) -> None:
        def changed(*given: Any, **options: Any) -> Any:
            return change(original, *given, **options)

        patch.setattr(owner, name, staticmethod(changed) if static else changed)

    return put


def in_every_program(
    patch: pytest.MonkeyPatch,
    name: str,
    programs: tuple[Any, ...] = (native, reference, in_triton),
) -> Callable[[Callable], None]:
    """Put what is decorated in the place of each program of an operation of the step."""

    def put(change: Callable) -> None:
        for program in programs:
            instead_of(patch, program, name)(change)

    return put


def substitute(patch: pytest.MonkeyPatch, original: Any, mutant: Any) -> None:
    """Bind a function anew in every module of the package that has imported it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "sametoken":
            for attribute, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, attribute, mutant)


def optimistic_end(x: StepInputs) -> torch.Tensor:
    """What would be computed if every draft of the step were accepted."""
    return x.num_computed + x.num_query + x.num_drafts

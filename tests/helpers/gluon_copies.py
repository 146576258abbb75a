"""Copies of threads into shared memory (cp.async), of kernels in Gluon that run in Python.

Threads of a program run as one here, so copies come as late as they may: a thread sees what
others have copied when these have waited for it and all have met at a barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from helpers.gluon_blocks import Pointer, load
from helpers.gluon_shared import Shared


@dataclass(slots=True)
class Copies:
    """A program's copies that are on their way.

    Attributes:
        begun: those of no group yet.
        groups: those of each group, in order.
        complete: those that have been waited for, since the last barrier.
    """

    begun: list[Callable[[], None]] = field(default_factory=list)
    groups: list[list[Callable[[], None]]] = field(default_factory=list)
    complete: list[Callable[[], None]] = field(default_factory=list)

    def drop(self) -> None:
        """Begin anew, for another program."""
        self.begun, self.groups, self.complete = [], [], []

    def begin(self, into: Shared, source: Pointer, mask: Any = True) -> None:
        """Begin a copy; what it will cover is NaN, and stays so where the mask forbids it."""
        into.memory.require_free(into.extent)
        data = load(source, mask, torch.nan).data
        into.write(torch.full_like(data, torch.nan))
        into.memory.awaited.append(into.extent)
        into.memory.copied.append(into.extent)
        self.begun.append(partial(_arrive, into, data))

    def take(self) -> list[Callable[[], None]]:
        """What has begun, of which nobody else hears."""
        begun, self.begun = self.begun, []
        return begun

    def commit(self) -> None:
        """What has begun is a group."""
        self.groups.append(self.take())

    def wait(self, num_outstanding: int = 0) -> None:
        """Wait for all groups but the last ones."""
        while len(self.groups) > num_outstanding:
            self.complete += self.groups.pop(0)

    def meet(self) -> None:
        """Threads meet: all see what each of them has waited for."""
        for arrive in self.complete:
            arrive()
        self.complete = []


def _arrive(into: Shared, data: torch.Tensor) -> None:
    into.write(data)
    into.memory.awaited.remove(into.extent)

"""Progress of a training: sums between reports, and steps that fit a time."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import NumericalError
from sametoken.train.acceptance import Acceptance
from sametoken.train.options import LoopOptions

CALMER = "use a lower learning rate or float32"
# Share of ``max_seconds`` that the steps are planned to take.
_PLANNED = 0.94


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The result of one batch.

    Attributes:
        loss: scalar, which training minimises.
        acceptance: counts of drafts; zero for a plain language model.
    """

    loss: Tensor
    acceptance: Acceptance

    def __add__(self, other: StepLoss) -> StepLoss:
        return StepLoss(self.loss + other.loss, self.acceptance + other.acceptance)


@dataclass(frozen=True, slots=True)
class Report:
    """Progress of a training, with means since the last report.

    Attributes:
        step: steps done.
        steps: steps in all.
        acceptance: how often each draft is accepted if all before it were.
        length: tokens per step with this acceptance.
        seconds: since the training began.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    acceptance: tuple[float, ...]
    length: float
    seconds: float


class Pace:
    """Turns ``max_seconds`` into a number of steps by timing the second half of warm-up.

    A training that is resumed within it times what is left of it.
    """

    def __init__(self, options: LoopOptions) -> None:
        self._seconds = options.max_seconds
        # Of one step there is no second half.
        self._warmup = max(options.warmup_steps, 2)
        # The step from which steps are timed, and the time after it.
        self._since: tuple[int, float] | None = None

    def wants(self, step: int) -> bool:
        """Whether the time after this step is needed."""
        is_first = self._since is None and self._warmup // 2 <= step < self._warmup
        return self._seconds is not None and (is_first or step == self._warmup)

    def planned(self, step: int, elapsed: float, steps: int) -> int:
        """The total number of steps; ``steps`` until warm-up has ended."""
        if step < self._warmup:
            self._since = step, elapsed
            return steps
        # Without it the training is resumed after warm-up, with the number of steps decided.
        if self._seconds is None or self._since is None:
            return steps
        first, then = self._since
        per_step = (elapsed - then) / (step - first)
        left = self._seconds * _PLANNED - elapsed
        return min(steps, max(step + int(left / max(per_step, 1e-6)), step))

    def is_late(self, elapsed: float) -> bool:
        """Whether the time is over."""
        return self._seconds is not None and elapsed > self._seconds


class Meter:
    """Sums since the last report, which stay on the device until the next."""

    def __init__(self) -> None:
        self._sum: StepLoss | None = None
        self._count = 0

    @classmethod
    def of(cls, sums: dict[str, Any], device: torch.device) -> Meter:
        """A meter that goes on from another one's ``sums``."""
        meter = cls()
        if sums:
            offered, accepted = (sums[name].to(device) for name in ("offered", "accepted"))
            if (
                offered.shape != accepted.shape
                or sums["loss"].shape
                or type(sums["count"]) is not int
            ):
                raise ValueError("sums since the last report have other shapes")
            meter._sum = StepLoss(sums["loss"].to(device), Acceptance(offered, accepted))
            meter._count = sums["count"]
        return meter

    def sums(self) -> dict[str, Any]:
        """The sums, for a checkpoint; empty just after a report."""
        if self._sum is None:
            return {}
        return asdict(self._sum.acceptance) | {"loss": self._sum.loss, "count": self._count}

    def add(self, found: StepLoss) -> None:
        """Add a step's loss and acceptance."""
        found = StepLoss(found.loss.detach(), found.acceptance)
        self._sum = found if self._sum is None else self._sum + found
        self._count += 1

    def wait(self) -> None:
        """Wait until the device has finished every step so far."""
        if self._sum is not None:
            self._sum.loss.item()

    def report(self, step: int, steps: int, rate: float, began: float) -> Report:
        """The means since the last report; sums begin anew.

        Raises:
            NumericalError: the loss is not finite.
        """
        assert self._sum is not None
        loss, acceptance = float(self._sum.loss) / self._count, self._sum.acceptance
        if not math.isfinite(loss):
            raise NumericalError(f"the loss is {loss} by step {step}", CALMER)
        seconds = time.monotonic() - began
        self._sum, self._count = None, 0
        return Report(step, steps, loss, rate, acceptance.conditional, acceptance.length, seconds)

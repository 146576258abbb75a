"""CUDA graphs of steps, cut at the logits: two for each shape that is captured."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sametoken.core.layout import NO_REQUESTS, StepLayout, StepShape
from sametoken.kernels.step.types import LayoutTable
from sametoken.runner.layout_ring import LayoutRing
from sametoken.runner.lent import lent
from sametoken.runner.processing import Between
from sametoken.runner.runner import Launcher
from sametoken.runner.step import Computed, Step

WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of a step's halves and what they work on.

    Attributes:
        forward, settle: the halves.
        layout: the memory that the first half fetches its layout to; owned here.
        computed, tokens: what the halves leave, on loan: until the next launch, of any shape.
    """

    forward: torch.cuda.CUDAGraph
    settle: torch.cuda.CUDAGraph
    layout: LayoutTable
    computed: Computed
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing cost, in seconds and bytes of device memory."""

    num_graphs: int
    seconds: float
    num_bytes: int


@dataclass(slots=True)
class StepGraphs:
    """``Launcher`` that replays graphs; nothing derived survives a replay.

    The first half fetches its layout from host memory and derives all inputs from the lengths
    that are committed when it runs; the second delivers results to the host. A result carries the
    id of the step whose layout was read, and the host refuses any other
    (tests/gpu/test_graphs_gpu.py).

    Attributes:
        step: the functions.
        shapes: what is captured, in the order in which they are tried.
        layouts: on their way to the device.
        others: runs steps that fit no captured shape.
    """

    step: Step
    shapes: tuple[StepShape, ...]
    layouts: LayoutRing
    others: Launcher
    _captured: dict[StepShape, CapturedStep] = field(default_factory=dict)

    def capture_all(self) -> CaptureReport:
        """Capture every shape, the largest first, so that all share its memory."""
        # What loading left in the allocator's cache must not count for or against the graphs.
        torch.cuda.empty_cache()
        started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for shape in reversed(self.shapes):
            self._captured[shape] = self._capture(shape, pool)
        used = free - torch.cuda.mem_get_info()[0]
        return CaptureReport(2 * len(self.shapes), time.monotonic() - started, used)

    def run(self, layout: StepLayout, first_place: int, between: Between) -> None:
        """See ``Launcher.run``."""
        shape = self._fitting(layout.shape)
        if shape is None:
            self.others.run(layout, first_place, between)
        else:
            self._replay(shape, layout, first_place, between)

    def _fitting(self, shape: StepShape) -> StepShape | None:
        """The smallest captured shape that holds one; None if none does."""
        return next((one for one in self.shapes if one.holds(shape)), None)

    def _replay(
        self, shape: StepShape, layout: StepLayout, first_place: int, between: Between
    ) -> None:
        captured = self._captured[shape]
        between.look()
        self._write(shape, layout, first_place)
        captured.forward.replay()
        between.process(captured.computed)
        captured.settle.replay()
        between.score(captured.tokens)

    def _write(self, shape: StepShape, layout: StepLayout, first_place: int = 0) -> None:
        self.layouts.write(layout.table(shape, self.step.sequences.reserved_slot, first_place))

    def _capture(self, shape: StepShape, pool: Any) -> CapturedStep:
        """Warm up and capture on a layout that is all padding: the same code as a real one."""
        layout = LayoutTable(self.layouts.memory(shape), shape)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                self._write(shape, NO_REQUESTS)
                self.step.settle(self._forward(layout))
        torch.cuda.current_stream().wait_stream(aside)
        # Where ranks are joined, a thread of the library looks after its own events meanwhile.
        mode = "global" if self.step.parallel.size == 1 else "thread_local"
        forward, settle = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=pool, capture_error_mode=mode):
            computed = self._forward(layout)
        with torch.cuda.graph(settle, pool=pool, capture_error_mode=mode):
            tokens = self.step.settle(computed).tokens
        # Owned, the logits of every shape would be held; on loan, all share one memory.
        return CapturedStep(forward, settle, layout, lent(computed), lent(tokens))

    def _forward(self, layout: LayoutTable) -> Computed:
        self.layouts.fetch(layout.table)
        return self.step.forward(layout)

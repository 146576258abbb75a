"""CUDA graphs of steps, cut at the logits: two for each shape that is captured.

Tensors over memory that a CUDA graph's pool owns: good until another graph of it runs.

Layouts on their way to captured steps: a ring in host memory, counted on both sides.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from sametoken.ops.step.types import LayoutTable, StepOps
from sametoken.runner.logits_processing import Between
from sametoken.runner.runner import Launcher
from sametoken.runner.step import ForwardOutput, Step
from sametoken.types.layout import (
    NO_REQUESTS,
    TABLE_ROWS,
    StepLayout,
    StepShape,
)

WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of a step's halves and what they work on.

    Attributes:
        forward, verify_and_propose: the halves.
        layout: the memory that the first half fetches its layout to; owned here.
        computed, tokens: what the halves leave, on loan: until the next launch, of any shape.
    """

    forward: torch.cuda.CUDAGraph
    verify_and_propose: torch.cuda.CUDAGraph
    layout: LayoutTable
    computed: ForwardOutput
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
        captured.verify_and_propose.replay()
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
                self.step.verify_and_propose(self._forward(layout))
        torch.cuda.current_stream().wait_stream(aside)
        # Where ranks are joined, a thread of the library looks after its own events meanwhile.
        mode = "global" if self.step.parallel.size == 1 else "thread_local"
        forward, verify_and_propose = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=pool, capture_error_mode=mode):
            computed = self._forward(layout)
        with torch.cuda.graph(verify_and_propose, pool=pool, capture_error_mode=mode):
            tokens = self.step.verify_and_propose(computed).tokens
        # Owned, the logits of every shape would be held; on loan, all share one memory.
        return CapturedStep(
            forward, verify_and_propose, layout, pool_tensors(computed), pool_tensors(tokens)
        )

    def _forward(self, layout: LayoutTable) -> ForwardOutput:
        self.layouts.fetch(layout.table)
        return self.step.forward(layout)


PoolTensors = TypeVar("PoolTensors")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Memory:
    """Device memory as CUDA's array interface (version 3) describes it."""

    def __init__(self, words: Tensor) -> None:
        size = words.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(words.shape),
            "typestr": f"<i{size}" if size > 1 else "|u1",
            "data": (words.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def pool_tensors(held: PoolTensors) -> PoolTensors:
    """A tensor, or a frozen dataclass with its tensors, that does not keep its memory.

    While a tensor lives, its graph's pool gives its memory to no other capture. Of one that is
    pool_tensors the pool disposes; what the graph leaves there is still read at the same address.
    """
    if isinstance(held, Tensor) and held.numel():
        assert held.is_contiguous()
        words = held.view(_WORDS[held.element_size()])
        return torch.as_tensor(_Memory(words), device=held.device).view(held.dtype)  # type: ignore[return-value]
    if is_dataclass(held) and not isinstance(held, type):
        parts: dict[str, Any] = {one.name: getattr(held, one.name) for one in fields(held)}
        return replace(held, **{name: pool_tensors(part) for name, part in parts.items()})
    return held


@dataclass(slots=True)
class LayoutRing:
    """The host writes a layout before each launch, and the launch fetches it by itself.

    Host and device count launches alike, so the n-th launch reads the n-th layout. An entry is
    written again after as many launches as the ring has entries; there must be as many of
    them as launches can be in flight.

    Attributes:
        entries: [N, E] int64 in host memory that the device reaches.
        turn: [1] int64 on the device, launches that it has begun.
        ops: fetch.
    """

    entries: Tensor
    turn: Tensor
    ops: StepOps
    _written: int = 0

    @classmethod
    def allocate(
        cls, num_entries: int, largest: StepShape, ops: StepOps, device: torch.device
    ) -> LayoutRing:
        """A ring for layouts of at most as many requests as ``largest`` has."""
        shape, pinned = (num_entries, TABLE_ROWS * largest.table_width), device.type == "cuda"
        entries = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        return cls(entries, torch.zeros(1, dtype=torch.int64, device=device), ops)

    def memory(self, shape: StepShape) -> Tensor:
        """[TABLE_ROWS, width] int64 on the device, for ``fetch``."""
        return self.turn.new_empty(TABLE_ROWS, shape.table_width)

    def write(self, table: list[list[int]]) -> None:
        """The layout of the next launch, as ``StepLayout.table`` gives it."""
        values = torch.tensor([*chain(*table)], dtype=torch.int64)
        self.entries[self._written % self.entries.shape[0], : values.numel()] = values
        self._written += 1

    def fetch(self, table: Tensor) -> None:
        """Read the next layout into device memory, in stream order; may be captured."""
        self.ops.fetch(self.entries, self.turn, table)

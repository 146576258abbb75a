"""CUDA graphs of steps: two for each captured shape, split at the logits.

``LayoutRing`` feeds layouts to them; ``pool_tensors`` lets all shapes share one memory pool.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sametoken.ops.step.types import LayoutTable, StepOps
from sametoken.runner.logits_processing import StepLogitsProcessor
from sametoken.runner.runner import Launcher
from sametoken.runner.step import ForwardOutput, Step
from sametoken.state.upload import upload
from sametoken.types.layout import NO_REQUESTS, TABLE_ROWS, StepLayout, StepShape


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of a step's two halves, with their static buffers.

    Attributes:
        forward, verify_and_propose: the halves.
        layout: device memory that the first half fetches its layout to; owned here.
        output, tokens: outputs of the halves, pooled: valid until the next launch of any shape.
    """

    forward: torch.cuda.CUDAGraph
    verify_and_propose: torch.cuda.CUDAGraph
    layout: LayoutTable
    output: ForwardOutput
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """The cost of capturing, in seconds and bytes of device memory."""

    num_graphs: int
    seconds: float
    num_bytes: int


@dataclass(slots=True)
class StepGraphs:
    """``Launcher`` that replays graphs; no derived input survives a replay.

    The first half fetches its layout from host memory and derives all inputs from the lengths
    committed when it runs; the second delivers results to the host. A result carries the step id
    of the layout that was read, and the host refuses any other (tests/gpu/test_graphs_gpu.py).

    Attributes:
        step: the functions to capture.
        shapes: see ``Launcher.shapes``.
        layouts: ring of layouts for the device.
        eager: runs steps that fit no captured shape.
        beside: graphs of the same weights, of which one runs at a time: captured with these.
    """

    step: Step
    shapes: tuple[StepShape, ...]
    layouts: LayoutRing
    eager: Launcher
    beside: tuple[StepGraphs, ...] = ()
    _captured: dict[StepShape, CapturedStep] = field(default_factory=dict)

    @torch.inference_mode()  # As steps run: nothing that they made may be written otherwise.
    def capture_all(self) -> CaptureReport:
        """Capture every shape, those of others too, so that all share one memory pool."""
        every = (self, *self.beside)
        with _garbage_freed_before():
            # Cached free blocks from loading would distort the memory figures.
            torch.cuda.empty_cache()
            started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
            pool = torch.cuda.graph_pool_handle()
            for graphs in every:
                graphs._capture_shapes(pool)
        used = free - torch.cuda.mem_get_info()[0]
        num_graphs = 2 * sum(len(graphs.shapes) for graphs in every)
        return CaptureReport(num_graphs, time.monotonic() - started, used)

    def _capture_shapes(self, pool: Any) -> None:
        """Capture the largest shape first, whose memory has room for the others."""
        self._warm_up(self.shapes[-1])
        for shape in reversed(self.shapes):
            self._captured[shape] = self._capture(shape, pool)

    def release(self) -> None:
        """Drop all graphs and what they hold of their memory pool; no step may be in flight."""
        for graphs in (self, *self.beside):
            graphs._captured.clear()

    def run(self, layout: StepLayout, first_place: int, processor: StepLogitsProcessor) -> None:
        """See ``Launcher.run``."""
        needed = layout.shape
        shape = next((one for one in self.shapes if one.holds(needed)), None)
        if shape is None:
            self.eager.run(layout, first_place, processor)
        else:
            self._replay(shape, layout, first_place, processor)

    def _replay(
        self,
        shape: StepShape,
        layout: StepLayout,
        first_place: int,
        processor: StepLogitsProcessor,
    ) -> None:
        captured = self._captured[shape]
        processor.start_masks()
        self._write(shape, layout, first_place)
        captured.forward.replay()
        processor.process(captured.output)
        captured.verify_and_propose.replay()
        processor.gather_logprobs(captured.tokens)

    def _write(self, shape: StepShape, layout: StepLayout, first_place: int = 0) -> None:
        self.layouts.write(layout.table(shape, self.step.sequences.reserved_slot, first_place))

    def _warm_up(self, shape: StepShape) -> None:
        """Run what a capture may not do first; kernels of other shapes are compiled before."""
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            # Before the write: the device would not count a launch that memory is missing for.
            layout = LayoutTable(self.layouts.memory(shape), shape)
            self._write(shape, NO_REQUESTS)
            self.step.verify_and_propose(self._forward(layout))
        torch.cuda.current_stream().wait_stream(side_stream)

    def _capture(self, shape: StepShape, pool: Any) -> CapturedStep:
        """Capture the code path of a real step."""
        layout = LayoutTable(self.layouts.memory(shape), shape)
        forward, verify_and_propose = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads may allocate for new weights, or be NCCL's watchdog, which queries events.
        with torch.cuda.graph(forward, pool=pool, capture_error_mode="thread_local"):
            output = self._forward(layout)
        with torch.cuda.graph(verify_and_propose, pool=pool, capture_error_mode="thread_local"):
            tokens = self.step.verify_and_propose(output).tokens
        # Owned outputs would keep the logits of every shape; pooled ones share one memory.
        return CapturedStep(
            forward, verify_and_propose, layout, pool_tensors(output), pool_tensors(tokens)
        )

    def _forward(self, layout: LayoutTable) -> ForwardOutput:
        self.layouts.fetch(layout.table)
        return self.step.forward(layout)


@contextmanager
def _garbage_freed_before() -> Iterator[None]:
    """No search for garbage within: to free an earlier engine's graphs would end a capture."""
    gc.collect()
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()


T = TypeVar("T")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Memory:
    """Non-owning view of device memory: the CUDA array interface, version 3."""

    def __init__(self, words: Tensor) -> None:
        size = words.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(words.shape),
            "typestr": f"<i{size}" if size > 1 else "|u1",
            "data": (words.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def pool_tensors(held: T) -> T:
    """Non-owning views of a tensor, or of a frozen dataclass's tensors.

    A live tensor keeps its block out of the graph pool for later captures. A view does not: the
    pool may reuse the block, and the graph's output is still read at the same address.
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
    """Ring buffer of layouts: the host writes one before each launch, and the launch fetches it.

    Host and device both count launches, so the n-th launch reads the n-th layout. The ring needs
    one entry for every launch that can be in flight.

    Attributes:
        entries: [N, E] int64 in host memory that the device can read.
        num_launches: [1] int64 on the device, launches begun.
        ops: provides ``fetch``.
    """

    entries: Tensor
    num_launches: Tensor
    ops: StepOps
    _written: int = 0

    @classmethod
    def allocate(
        cls, num_entries: int, largest: StepShape, ops: StepOps, device: torch.device
    ) -> LayoutRing:
        """A ring for layouts of up to ``largest``'s number of requests."""
        shape, pinned = (num_entries, TABLE_ROWS * largest.table_width), device.type == "cuda"
        entries = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        return cls(entries, torch.zeros(1, dtype=torch.int64, device=device), ops)

    def memory(self, shape: StepShape) -> Tensor:
        """[TABLE_ROWS, width] int64 on the device, for ``fetch``."""
        return self.num_launches.new_empty(TABLE_ROWS, shape.table_width)

    def write(self, table: list[list[int]]) -> None:
        """Write the layout of the next launch, in the form of ``StepLayout.table``."""
        values = upload(table, self.entries.device).flatten()
        self.entries[self._written % self.entries.shape[0], : values.numel()] = values
        self._written += 1

    def fetch(self, table: Tensor) -> None:
        """Read the next layout into device memory, in stream order; may be captured."""
        self.ops.fetch(self.entries, self.num_launches, table)

"""CUDA graphs of whole steps, one per bucket of plan rows and rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sametoken.runner.padded import PLAN_FIELDS, PaddedStep
from sametoken.state.padded import FixedLayout

WARM_UP_RUNS = 2

#: How many chunks of the largest bucket one launch takes: matrix products gain from rows.
CHUNKS_TOGETHER = (4, 2, 1)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A captured shape: plan rows, and rows of each chunk (0 for decoding windows)."""

    batch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph and its static buffers: the plan it reads, constants, the outcome it leaves."""

    graph: torch.cuda.CUDAGraph
    plan: Tensor
    layout: FixedLayout
    outcome: Tensor


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing cost, in seconds and bytes of device memory."""

    num_graphs: int
    seconds: float
    num_bytes: int


@dataclass(slots=True)
class StepGraphs:
    """Runs padded steps by replaying graphs; nothing derived survives a replay.

    Stage runs inside the graph, so a replay reads the lengths that are committed when it
    runs. The outcome carries the step id of the plan that was read, and the host refuses
    any other (tests/gpu/test_graphs_gpu.py).

    Attributes:
        step: the verbs.
        windows, chunks: buckets, ascending.
    """

    step: PaddedStep
    windows: tuple[int, ...]
    chunks: tuple[int, ...]
    _captured: dict[Bucket, CapturedStep] = field(default_factory=dict)

    def capture_all(self) -> CaptureReport:
        """Capture every bucket, the largest first, so that all share its memory."""
        # What loading left in the allocator's cache must not count for or against the graphs.
        torch.cuda.empty_cache()
        started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        buckets = [Bucket(batch, self.chunks[-1]) for batch in CHUNKS_TOGETHER]
        buckets += [Bucket(1, rows) for rows in reversed(self.chunks[:-1])]
        buckets += [Bucket(batch, 0) for batch in reversed(self.windows)]
        pool = torch.cuda.graph_pool_handle()
        for bucket in buckets:
            self._captured[bucket] = self._capture(bucket, pool)
        used = free - torch.cuda.mem_get_info()[0]
        return CaptureReport(len(buckets), time.monotonic() - started, used)

    def run_windows(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Outcomes of a step's windows, [len(rows), 4 + k + 1]; valid until the next run."""
        batch = next(size for size in self.windows if size >= len(rows))
        return self._replay(Bucket(batch, 0), rows)

    def run_chunks(self, rows: Sequence[tuple[int, ...]], num_query: int) -> Tensor:
        """Outcomes of prefill chunks, [len(rows), 4 + 1]; valid until the next run.

        Args:
            rows: one chunk, or several as ``CHUNKS_TOGETHER`` names them.
            num_query: the longest of them, in tokens; above all but the largest bucket if
                there are several.
        """
        size = next(size for size in self.chunks if size >= num_query)
        return self._replay(Bucket(len(rows), size), rows)

    def _replay(self, bucket: Bucket, rows: Sequence[tuple[int, ...]]) -> Tensor:
        captured = self._captured[bucket]
        captured.plan.copy_(self._plan_of(bucket, rows), non_blocking=True)
        captured.graph.replay()
        return captured.outcome[: len(rows)]

    def _capture(self, bucket: Bucket, pool: Any) -> CapturedStep:
        """Warm up and capture on a plan that is all padding: the same code as a real one."""
        plan = torch.empty((PLAN_FIELDS, bucket.batch), dtype=torch.int64, device="cuda")
        plan.copy_(self._plan_of(bucket, ()), non_blocking=True)
        layout = self.step.layout(bucket.batch, bucket.chunk)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                self._run(bucket, plan, layout)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Where ranks are joined, a thread of the library looks after its own events meanwhile.
        mode = "global" if self.step.parallel.size == 1 else "thread_local"
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            outcome = self._run(bucket, plan, layout)
        return CapturedStep(graph, plan, layout, outcome)

    def _run(self, bucket: Bucket, plan: Tensor, layout: FixedLayout) -> Tensor:
        if bucket.chunk:
            return self.step.chunks(plan, layout, bucket.chunk)
        return self.step.windows(plan, layout)

    def _plan_of(self, bucket: Bucket, rows: Sequence[tuple[int, ...]]) -> Tensor:
        padding = (self.step.sequences.reserved_slot, 0, 0, 0)
        padded = [*rows, *[padding] * (bucket.batch - len(rows))]
        return torch.tensor(list(zip(*padded, strict=True)), dtype=torch.int64, pin_memory=True)

"""CUDA graphs of steps cut at the logits: two per bucket of plan rows and rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sametoken.kernels.transfer.triton import deliver
from sametoken.runner.between import Between
from sametoken.runner.lent import lent
from sametoken.runner.padded import Computed, PaddedStep
from sametoken.runner.plan_ring import PlanRing, UploadedRow
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
    """The graphs of a step's halves and what they work on.

    Attributes:
        forward, settle: the halves.
        plan, layout: memory for the plan, and constants.
        computed, tokens: what the halves leave, on loan: until the next launch, of any bucket.
    """

    forward: torch.cuda.CUDAGraph
    settle: torch.cuda.CUDAGraph
    plan: Tensor
    layout: FixedLayout
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
    """Runs padded steps by replaying graphs; nothing derived survives a replay.

    The first fetches its plan from host memory, the second delivers verdicts to it. Stage runs
    inside the first, so a replay reads the lengths that are committed when it runs. A verdict
    carries the step id of the plan that was read, and the host refuses any other
    (tests/gpu/test_graphs_gpu.py).

    Attributes:
        step: the verbs.
        windows, chunks: buckets, ascending.
        plans: on their way to the device.
        verdicts: [R, 4 + k + 1] int64, the host's memory for them (``OutputRing.rows``).
    """

    step: PaddedStep
    windows: tuple[int, ...]
    chunks: tuple[int, ...]
    plans: PlanRing
    verdicts: Tensor
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

    def run_windows(self, rows: Sequence[UploadedRow], between: Between) -> None:
        """Run a step's windows."""
        batch = next(size for size in self.windows if size >= len(rows))
        self._replay(Bucket(batch, 0), rows, between)

    def run_chunks(self, rows: Sequence[UploadedRow], num_query: int, between: Between) -> None:
        """Run prefill chunks.

        Args:
            rows: one chunk, or several as ``CHUNKS_TOGETHER`` names them.
            num_query: the longest of them, in tokens; above all but the largest bucket if
                there are several.
            between: what the rows' requests ask of their logits.
        """
        size = next(size for size in self.chunks if size >= num_query)
        self._replay(Bucket(len(rows), size), rows, between)

    def _replay(self, bucket: Bucket, rows: Sequence[UploadedRow], between: Between) -> None:
        captured = self._captured[bucket]
        between.look()
        self.plans.write(rows, bucket.batch)
        captured.forward.replay()
        between.process(captured.computed)
        captured.settle.replay()
        between.score(captured.tokens)

    def _capture(self, bucket: Bucket, pool: Any) -> CapturedStep:
        """Warm up and capture on a plan that is all padding: the same code as a real one."""
        plan = self.plans.memory(bucket.batch)
        layout = self.step.layout(bucket.batch, bucket.chunk)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                self.plans.write((), bucket.batch)
                self._settle(plan, layout, self._forward(bucket, plan, layout))
        torch.cuda.current_stream().wait_stream(aside)
        # Where ranks are joined, a thread of the library looks after its own events meanwhile.
        mode = "global" if self.step.parallel.size == 1 else "thread_local"
        forward, settle = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=pool, capture_error_mode=mode):
            computed = self._forward(bucket, plan, layout)
        with torch.cuda.graph(settle, pool=pool, capture_error_mode=mode):
            tokens = self._settle(plan, layout, computed)
        # Owned, the logits of every bucket would be held; on loan, all share one memory.
        return CapturedStep(forward, settle, plan, layout, lent(computed), lent(tokens))

    def _forward(self, bucket: Bucket, plan: Tensor, layout: FixedLayout) -> Computed:
        self.plans.fetch(plan)
        if bucket.chunk:
            return self.step.chunks(plan[:-1], layout, bucket.chunk)
        return self.step.windows(plan[:-1])

    def _settle(self, plan: Tensor, layout: FixedLayout, computed: Computed) -> Tensor:
        settled = self.step.settle(plan[:-1], layout, computed)
        deliver(settled.outcome, plan[-1], self.verdicts)
        return settled.tokens

"""Steps by graph, but for the rows of requests that no graph serves: the eager verbs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sametoken.core.plan import Admission, StepPlan
from sametoken.runner.async_output import HostBuffer, PendingOutput
from sametoken.runner.between import Between, LogitsProcessing
from sametoken.runner.graphs import CHUNKS_TOGETHER, StepGraphs
from sametoken.runner.plan_ring import UploadedRow
from sametoken.runner.step import StepRunner


@dataclass(frozen=True, slots=True)
class Parts:
    """Plan rows by the launch that runs them, in the order of the launches.

    Attributes:
        windows: one launch.
        chunks: a launch each; several chunks of the largest bucket share one.
        special: rows of requests that no graph serves: the eager verbs.
    """

    windows: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    special: tuple[int, ...]

    def places(self) -> tuple[int, ...]:
        """Of each plan row, which row of the host's buffer its verdict goes to."""
        launched = [*self.windows, *(b for group in self.chunks for b in group), *self.special]
        place = {b: i for i, b in enumerate(launched)}
        return tuple(place[b] for b in range(len(launched)))


@dataclass(frozen=True, slots=True)
class GraphedRunner:
    """Splits a plan into windows, chunks and the rest; every part keeps the row law.

    Since a row's bits do not depend on its company, how a plan is split changes nothing
    but speed (tests/gpu/test_law_gpu.py).

    Attributes:
        eager: takes up plans, and runs the rows of requests that no graph serves.
        graphs: run all other rows.
        processing: what requests ask of their logits between the halves of a graph.
    """

    eager: StepRunner
    graphs: StepGraphs
    processing: LogitsProcessing
    _special: set[int] = field(default_factory=set)

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step; its result is read later from the returned output."""
        for admission in plan.admissions:
            self._remember(admission)
        parts = self._split(plan)
        buffer = self.eager.ring.acquire()
        landed = self.eager.stream.submit(lambda: self._run(plan, parts, buffer))
        return PendingOutput(plan, parts.places(), buffer, landed, self.eager.ring)

    def _run(self, plan: StepPlan, parts: Parts, buffer: HostBuffer) -> None:
        self.eager.take_up(plan)
        place = buffer.first_place
        if parts.windows:
            rows = [
                _uploaded(plan, b, plan.rows[b].draft_limit, True, place + i)
                for i, b in enumerate(parts.windows)
            ]
            self.graphs.run_windows(rows, self._between(plan, parts.windows, buffer, 0))
        done = len(parts.windows)
        for group in parts.chunks:
            lengths = [plan.rows[b].num_query for b in group]
            rows = [
                _uploaded(plan, b, length, plan.rows[b].samples, place + done + i)
                for i, (b, length) in enumerate(zip(group, lengths, strict=True))
            ]
            between = self._between(plan, group, buffer, done)
            self.graphs.run_chunks(rows, max(lengths), between)
            done += len(group)
        if parts.special:
            rest = replace(plan, rows=tuple(plan.rows[b] for b in parts.special))
            self.eager.run_rows(rest, buffer, first=done)

    def _split(self, plan: StepPlan) -> Parts:
        windows: list[int] = []
        chunks: list[tuple[int, ...]] = []
        large: list[int] = []
        special: list[int] = []
        sizes = self.graphs.chunks
        for b, row in enumerate(plan.rows):
            if row.slot in self._special or row.num_query > sizes[-1]:
                special.append(b)
            elif row.samples and row.num_query == 1:
                windows.append(b)
            elif len(sizes) > 1 and row.num_query <= sizes[-2]:
                chunks.append((b,))
            else:
                large.append(b)
        while large:
            together = next(size for size in CHUNKS_TOGETHER if size <= len(large))
            chunks.append(tuple(large[:together]))
            large = large[together:]
        return Parts(tuple(windows), tuple(chunks), tuple(special))

    def _between(
        self, plan: StepPlan, launched: tuple[int, ...], buffer: HostBuffer, first: int
    ) -> Between:
        return self.processing.of_launch([plan.rows[b] for b in launched], buffer, first)

    def _remember(self, admission: Admission) -> None:
        self._special.discard(admission.slot)
        if not self.graphs.step.serves(admission):
            self._special.add(admission.slot)


def _uploaded(plan: StepPlan, b: int, amount: int, flag: bool, place: int) -> UploadedRow:
    return (plan.rows[b].slot, amount, int(flag), plan.step_id, place)

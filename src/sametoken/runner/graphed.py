"""Steps by graph where a request's parameters allow it, by the eager verbs where not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sametoken.core.plan import Admission, PlanRow, StepPlan
from sametoken.runner.async_output import HostBuffer, PendingOutput
from sametoken.runner.graphs import StepGraphs
from sametoken.runner.step import StepRunner


@dataclass(frozen=True, slots=True)
class GraphedRunner:
    """Splits a plan into windows, chunks and the rest; every part keeps the row law.

    Since a row's bits do not depend on its company, how a plan is split changes nothing
    but speed (tests/gpu/test_law_gpu.py).

    Attributes:
        eager: takes up plans, and runs rows whose logits need processing on the way.
        graphs: run all other rows.
    """

    eager: StepRunner
    graphs: StepGraphs
    _special: set[int] = field(default_factory=set)

    def submit(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a step; its result is read later from the returned output."""
        for admission in plan.admissions:
            self._remember(admission)
        windows = [b for b, row in enumerate(plan.rows) if self._is_window(row)]
        chunks = [b for b, row in enumerate(plan.rows) if self._is_chunk(row)]
        graphed = {*windows, *chunks}
        special = [b for b in range(len(plan.rows)) if b not in graphed]
        buffer = self.eager.ring.acquire()
        landed = self.eager.stream.submit(
            lambda: self._run(plan, (windows, chunks, special), buffer)
        )
        place = {b: i for i, b in enumerate((*windows, *chunks, *special))}
        order = tuple(place[b] for b in range(len(plan.rows)))
        return PendingOutput(plan, order, buffer, landed, self.eager.ring)

    def _run(
        self, plan: StepPlan, parts: tuple[list[int], list[int], list[int]], buffer: HostBuffer
    ) -> None:
        windows, chunks, special = parts
        self.eager.take_up(plan)
        if windows:
            rows = [self._uploaded(plan, b, plan.rows[b].draft_limit, 1) for b in windows]
            buffer.copy_from(self.graphs.run_windows(rows), 0)
        for done, b in enumerate(chunks, start=len(windows)):
            row = plan.rows[b]
            uploaded = self._uploaded(plan, b, row.num_query, int(row.samples))
            buffer.copy_from(self.graphs.run_chunk(uploaded, row.num_query), done)
        if special:
            rest = replace(plan, rows=tuple(plan.rows[b] for b in special))
            self.eager.run_rows(rest, buffer, first=len(windows) + len(chunks))

    def _uploaded(self, plan: StepPlan, b: int, amount: int, flag: int) -> tuple[int, ...]:
        return (plan.rows[b].slot, amount, flag, plan.step_id)

    def _remember(self, admission: Admission) -> None:
        self._special.discard(admission.slot)
        if needs_processing(admission):
            self._special.add(admission.slot)

    def _is_window(self, row: PlanRow) -> bool:
        return row.samples and row.num_query == 1 and row.slot not in self._special

    def _is_chunk(self, row: PlanRow) -> bool:
        plain = row.slot not in self._special and not self._is_window(row)
        return plain and row.num_query <= self.graphs.chunks[-1]


def needs_processing(admission: Admission) -> bool:
    """Whether a request's logits are more than divided by its temperature."""
    params = admission.params
    return (
        params.top_k > 0
        or params.top_p < 1
        or params.min_p > 0
        or params.has_penalties
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(admission.bad_words_token_ids)
        or params.min_tokens > 0
        or params.logprobs is not None
        or params.prompt_logprobs is not None
    )

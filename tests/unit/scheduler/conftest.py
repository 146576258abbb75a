from types import SimpleNamespace

import pytest

from helpers.scheduler_limits import make_limits
from sametoken.scheduler.scheduler import Scheduler
from sametoken.types.outputs import RequestResult, StepResult
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams


def make_scheduler(**overrides):
    return Scheduler(make_limits(**overrides))


def make_request(name, prompt, max_total=None, max_drafts=None, cached=True, **params):
    """``prompt`` is token ids, or a length for a prompt like no other."""
    if isinstance(prompt, int):
        prompt = tuple(sum(map(ord, name)) + 1000 * i for i in range(prompt))
    total = len(prompt) + 8 if max_total is None else max_total
    sampling = SamplingParams(temperature=0.0, **params)
    return EngineRequest(
        name,
        tuple(prompt),
        sampling,
        total,
        num_speculative_tokens=max_drafts,
        use_prefix_cache=cached,
    )


def add_all(scheduler, names, prompt, **options):
    """Requests that differ in their names alone."""
    for name in names:
        scheduler.add(make_request(name, prompt, **options))


def result_of(plan, accept=0, failed=(), proposed=64):
    """Every row is offered its drafts of those proposed, and accepts up to ``accept``."""
    rows = []
    for row in plan.requests:
        drafts = min(proposed, row.draft_limit)
        accepted = min(accept, drafts)
        tokens = (7,) * (accepted + 1) if row.samples else ()
        rows.append(RequestResult(drafts, proposed, accepted, tokens, row.slot in failed))
    return StepResult(plan.step_id, tuple(rows))


def step(scheduler, accept=0, proposed=64):
    """Plan one step and process its result; the plan and its updates."""
    plan = scheduler.plan()
    updates = scheduler.process_output(result_of(plan, accept, proposed=proposed))
    scheduler.check_integrity()
    return plan, updates


def rows_of(plan):
    return [(row.slot, row.num_query, row.draft_limit, row.samples) for row in plan.requests]


@pytest.fixture(scope="session")
def kit():
    """Small words for scheduler tests."""
    return SimpleNamespace(
        limits=make_limits,
        scheduler=make_scheduler,
        request=make_request,
        add=add_all,
        result=result_of,
        step=step,
        rows=rows_of,
    )

"""Requests are prepared in threads, and refused once the server takes none."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sametoken.errors import DrainingError
from sametoken.serving.preparations import Preparations
from sametoken.text.grammar.trials import AT_ONCE

PATIENCE_S = 60.0


@pytest.mark.parametrize("has_new_grammar", [False, True])
async def test_the_result_or_the_error_comes_back(has_new_grammar):
    preparations = Preparations()
    assert await preparations.run(lambda: 7, has_new_grammar=has_new_grammar) == 7
    with pytest.raises(ZeroDivisionError):
        await preparations.run(lambda: 1 / 0, has_new_grammar=has_new_grammar)
    preparations.stop()


@pytest.mark.parametrize("has_new_grammar", [False, True])
@pytest.mark.parametrize("end", [Preparations.end, Preparations.stop])
async def test_what_runs_or_waits_is_refused_at_the_end(has_new_grammar, end):
    preparations, gate = Preparations(), threading.Event()

    async def prepare():
        await preparations.run(lambda: gate.wait(PATIENCE_S), has_new_grammar=has_new_grammar)

    tasks = [asyncio.create_task(prepare()) for _ in range(AT_ONCE + 1)]
    await asyncio.sleep(0.01)
    end(preparations)
    done, _ = await asyncio.wait(tasks, timeout=PATIENCE_S / 2)
    gate.set()
    assert [type(task.exception()) for task in done] == [DrainingError] * len(tasks)
    preparations.stop()


async def test_a_cancelled_call_gives_its_slot_back_once_the_thread_is_free():
    preparations, gate = Preparations(), threading.Event()

    def work():
        return gate.wait(PATIENCE_S)

    tasks = [
        asyncio.create_task(preparations.run(work, has_new_grammar=True)) for _ in range(AT_ONCE)
    ]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    gate.set()
    assert await preparations.run(work, has_new_grammar=True)
    preparations.stop()

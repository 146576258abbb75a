"""Adapters of an ``AsyncLLM`` whose callers go away, and whose engine does."""

from __future__ import annotations

import asyncio

import pytest

from sametoken.errors import EngineRestartingError
from sametoken.serving.adapters import ServedAdapters
from sametoken.serving.messages import LoadAdapter
from sametoken.types.lora_modules import AdapterNames, LoRAModule

PATH = "/adapters/sql"


class Engine:
    """Carries commands out as slowly as ``may_answer`` says."""

    def __init__(self) -> None:
        self.commands, self.may_answer, self.restarts = [], asyncio.Event(), False
        self.may_answer.set()

    async def command(self, command) -> int:
        self.commands.append(command)
        if self.restarts:
            raise EngineRestartingError("the engine is being started again", "wait")
        await self.may_answer.wait()
        return 0


async def cancelled_in_its_midst(engine: Engine, coroutine) -> None:
    engine.may_answer.clear()
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_load_whose_caller_went_away_ends_before_the_next_one():
    """Else the engine has an adapter whose name nobody may choose or unload."""
    engine = Engine()
    adapters = ServedAdapters(AdapterNames(()), engine.command)
    await cancelled_in_its_midst(engine, adapters.load("sql", PATH))
    other = asyncio.ensure_future(adapters.load("b", PATH))
    await asyncio.sleep(0.01)
    assert engine.commands == [LoadAdapter("sql", PATH)]
    engine.may_answer.set()
    await other
    assert engine.commands == [LoadAdapter(name, PATH) for name in ("sql", "b")]
    assert [one.name for one in adapters.modules] == ["sql", "b"]


async def test_what_an_engine_that_restarts_has_is_not_unloaded():
    engine = Engine()
    adapters = ServedAdapters(AdapterNames([LoRAModule("sql", PATH)]), engine.command)
    engine.restarts = True
    with pytest.raises(EngineRestartingError):
        await adapters.unload("sql")
    assert adapters.named.name("sql") == "sql"


async def test_names_are_those_of_the_start_once_an_engine_died_after_its_answer():
    """It may die before who asked goes on: then it had what it has no more."""
    engine, names = Engine(), AdapterNames([LoRAModule("own", PATH)])

    async def command(command) -> int:
        await engine.command(command)
        names.restart()
        return 0

    adapters = ServedAdapters(names, command)
    await adapters.load("sql", PATH)
    await adapters.finish_update("sent")
    await adapters.unload("own")
    assert adapters.modules == (LoRAModule("own", PATH),)

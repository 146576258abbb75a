"""Calls of ``AsyncLLM`` that would wait for ever or fail later: refused at once, with the cause."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from helpers.serving import SIZES, write_model
from sametoken import SamplingParams
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, RequestError
from sametoken.serving.async_llm import AsyncLLM

ONE = SamplingParams(max_tokens=1)
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory, backend):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny", backend))


def test_another_event_loop_is_refused_and_not_left_waiting(model):
    with asyncio.Runner() as runner:
        config = EngineConfig.from_options(model=model, **SIZES)
        llm = runner.run(AsyncLLM.start(config))

        async def elsewhere():
            for call in (llm.pause, lambda: llm.abort("b"), lambda: llm.update_weights(model)):
                with pytest.raises(RequestError, match="another event loop"):
                    await call()
            with pytest.raises(RequestError, match="another event loop"):
                llm.generate("a", ONE, "b")

        async def begun():
            return llm.generate("a", replace(ONE, max_tokens=2), "begun")

        stream = runner.run(begun())
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, elsewhere()).result(PATIENCE_S)
        with pytest.raises(RequestError, match="another event loop"):
            llm.generate("a", ONE, "no loop")

        async def finish_reason():
            return [one async for one in stream][-1].outputs[0].finish_reason

        # The pause that was refused has ended nothing.
        assert runner.run(finish_reason()) == "length"
        runner.run(llm.shutdown())


def test_a_model_s_name_is_no_config(model):
    with pytest.raises(ConfigError, match=r"EngineConfig\.from_options"):
        asyncio.run(AsyncLLM.start(model))

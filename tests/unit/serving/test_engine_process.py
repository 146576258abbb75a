"""Engine processes: they start, say why they cannot, and are seen to die."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from helpers.checkpoints import write_llama
from helpers.serving import (
    FATAL_TOKEN,
    SIZES,
    build_faulty,
    build_never,
    build_slowly,
    build_wrongly,
)
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.errors import ConfigError, EngineDeadError
from sametoken.io.child_process import spawn
from sametoken.serving import engine_process
from sametoken.serving.engine_process import EngineProcess
from sametoken.serving.messages import StepReport, Submit
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = write_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=256)
    return EngineConfig.from_options(model=str(path), skip_tokenizer_init=True, **SIZES)


#: For what comes at once or never.
PATIENCE_S = 120.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def halt(process: EngineProcess) -> None:
    """Stop it with all of its threads, so that a closed socket cannot end it."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def request(*prompt):
    params = SamplingParams(temperature=0.0, seed=0)
    return Submit((EngineRequest("r", prompt, params, len(prompt) + 4),))


async def test_it_serves_fails_and_says_why(config):
    process = await EngineProcess.start(config, build_faulty)
    assert process.ready.summary.max_model_len == 256
    assert process.ready.limits.max_num_seqs == 8
    process.send(request(1, 2))
    emitted = []
    while len(emitted) < 4:
        report = await process.receive()
        assert isinstance(report, StepReport)
        emitted += [token for update in report.updates for token in update.token_ids]
    process.send(request(FATAL_TOKEN))
    while await process.receive() is not None:
        pass
    error = await process.stop()
    assert isinstance(error, EngineDeadError)
    assert "a kernel failed" in error.cause
    assert not is_alive(process.pid)
    process.send(request(1))


async def test_a_killed_process_is_seen_at_once_and_a_closed_socket_ends_it(config):
    first, second = await asyncio.gather(
        EngineProcess.start(config, build_engine), EngineProcess.start(config, build_engine)
    )
    # Only the serving process stops it: a terminal's Ctrl-C reaches all.
    os.kill(first.pid, signal.SIGINT)
    os.kill(first.pid, signal.SIGTERM)
    first.send(request(1, 2))
    assert isinstance(await first.receive(), StepReport)
    os.kill(first.pid, signal.SIGKILL)
    while await asyncio.wait_for(first.receive(), PATIENCE_S) is not None:
        pass
    assert "ended with SIGKILL, as Linux" in (await first.stop()).cause

    # By itself: one that is killed has another status.
    assert "exit status 0" in (await second.stop(grace_s=PATIENCE_S)).cause
    assert not is_alive(second.pid)


async def test_a_stop_that_is_given_up_leaves_no_process(config):
    process = await EngineProcess.start(config, build_engine)
    halt(process)
    stopping = asyncio.create_task(process.stop(grace_s=0.2))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    async with asyncio.timeout(PATIENCE_S):
        while process._process.poll() is None:
            await asyncio.sleep(0.01)
    assert process._process.returncode == -signal.SIGKILL


async def test_a_process_that_reads_nothing_is_killed(config):
    process = await EngineProcess.start(config, build_engine)
    halt(process)
    # More than the socket holds.
    process.send(request(*range(2**18)))
    error = await asyncio.wait_for(process.stop(grace_s=0.1), PATIENCE_S)
    assert "SIGKILL" in error.cause
    assert not is_alive(process.pid)


@pytest.mark.parametrize(
    ("build", "options", "kind", "cause"),
    [
        (build_engine, {"num_kv_blocks": 1}, ConfigError, "the KV memory holds"),
        (build_wrongly, {}, EngineDeadError, "ZeroDivisionError.*a defect"),
        (build_never, {}, EngineDeadError, "ended with exit status 7"),
    ],
)
def test_why_it_cannot_start_is_told_by_its_own_error(config, build, options, kind, cause):
    wanted = {"model": config.model, "skip_tokenizer_init": True, **SIZES, **options}
    with pytest.raises(kind, match=cause) as caught:
        asyncio.run(EngineProcess.start(EngineConfig.from_options(**wanted), build))
    assert type(caught.value) is kind


async def test_a_start_that_is_given_up_at_its_beginning_leaves_no_process(config, monkeypatch):
    started = []

    def spawn_noted(*given):
        started.append(spawn(*given))
        return started[0]

    monkeypatch.setattr(engine_process, "spawn", spawn_noted)
    start = asyncio.create_task(EngineProcess.start(config, build_engine))
    await asyncio.sleep(0)
    start.cancel()
    await asyncio.wait((start,))
    ((process, _),) = started
    assert process.returncode is not None


async def test_a_start_that_is_given_up_leaves_no_process(config, caplog):
    with caplog.at_level(logging.INFO, "sametoken"):
        start = asyncio.create_task(EngineProcess.start(config, build_slowly))
        while "pid " not in caplog.text:
            assert not start.done()
            await asyncio.sleep(0.02)
        start.cancel()
        await asyncio.wait((start,))
    pid = int(caplog.messages[-1].split()[1])
    assert not is_alive(pid)

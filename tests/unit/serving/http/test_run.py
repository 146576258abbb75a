from __future__ import annotations

import asyncio
import logging
import signal
import socket
from dataclasses import replace

import httpx2 as httpx
import pytest

from helpers.fake_engine import STATS, FakeEngine
from sametoken.config import EngineConfig
from sametoken.errors import DrainingError
from sametoken.serving.http import run
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.listen import address_of, bind
from sametoken.serving.http.run import DrainingServer
from sametoken.serving.limits import ServingLimits

CONFIG = ServerConfig(port=0, log_level="warning", drain_timeout=5.0, root_path="/llm")


class DrainedEngine(FakeEngine):
    """Drains when a test says so."""

    def __init__(self, *, in_time: bool = True) -> None:
        super().__init__()
        self.at_rest = asyncio.Event()
        self.in_time = in_time

    async def drain(self, timeout_s: float) -> bool:
        assert timeout_s == CONFIG.drain_timeout
        self.is_ready = False
        self.refuse = DrainingError("it stops", "go elsewhere")
        await self.at_rest.wait()
        return self.in_time


async def started(engine: FakeEngine) -> tuple[DrainingServer, asyncio.Task, str]:
    listener = bind(CONFIG)
    server = DrainingServer(create_app(engine, CONFIG), engine, CONFIG)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    return server, task, address_of(listener, CONFIG)


@pytest.mark.parametrize("in_time", [True, False])
async def test_sigterm_drains_while_the_server_answers(in_time, caplog):
    engine = DrainedEngine(in_time=in_time)
    server, task, url = await started(engine)
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.02)
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.json()["error"]["code"] == "draining"
        assert not task.done()
        engine.at_rest.set()
    await asyncio.wait_for(task, 10)
    assert not server.interrupted
    assert ("aborted" in caplog.text) == (not in_time)


@pytest.mark.parametrize(
    "signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)]
)
async def test_a_second_signal_or_sigint_waits_for_nobody(signals):
    server, task, _ = await started(DrainedEngine())
    for number in signals:
        server.handle_exit(number, None)
        await asyncio.sleep(0.02)
    await asyncio.wait_for(task, 10)
    assert server.interrupted == (signal.SIGINT in signals)


def test_a_second_signal_leaves_no_traceback(capsys):
    async def end_at_once() -> None:
        server, task, _ = await started(FakeEngine())
        for _ in range(2):
            server.handle_exit(signal.SIGINT, None)
        await asyncio.wait_for(task, 10)

    asyncio.run(end_at_once())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("begun", [b"", b'{"prompt"'])
async def test_a_body_that_has_not_come_in_whole_is_not_waited_for(begun, caplog):
    server, task, url = await started(FakeEngine())
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n"
    writer.write(head.encode() + begun)
    await asyncio.sleep(0.02)
    server.handle_exit(signal.SIGINT, None)
    # Less than ``_LAST_SECONDS``.
    await asyncio.wait_for(task, 3)
    assert await reader.read() == b""
    writer.close()
    assert not caplog.records


@pytest.fixture
def told(monkeypatch) -> list:
    """What an engine is told that starts at once, and what a test adds."""
    noted = []

    class Engine(FakeEngine):
        async def start_grammar_trials(self) -> None:
            """There are none."""

        async def shutdown(self) -> None:
            noted.append("ended")

    async def start(config, limits):
        return Engine()

    monkeypatch.setattr(run.AsyncLLM, "start", start)
    return noted


@pytest.mark.parametrize("is_off", [False, True])
def test_the_load_is_logged_while_the_server_runs(monkeypatch, told, is_off):
    async def log_load(read) -> None:
        told.append(read().num_output_tokens)
        try:
            await asyncio.Event().wait()
        finally:
            told.append("stopped")

    async def serve(self, sockets) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(run, "log_load", log_load)
    monkeypatch.setattr(run.DrainingServer, "serve", serve)
    config = replace(CONFIG, disable_log_stats=is_off)
    with bind(config) as listener:
        assert not asyncio.run(run._serve(EngineConfig(), ServingLimits(), config, listener))
    assert told == (["ended"] if is_off else [STATS.num_output_tokens, "ended", "stopped"])


@pytest.mark.usefixtures("told")
def test_sigint_just_before_the_server_runs_leaves_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(run, "exempt_objects", lambda: signal.raise_signal(signal.SIGINT))
    with bind(CONFIG) as listener, pytest.raises(KeyboardInterrupt):
        asyncio.run(run._serve(EngineConfig(), ServingLimits(), CONFIG, listener))
    assert capsys.readouterr().err == ""


def test_sigterm_ends_a_server_that_still_loads(monkeypatch):
    async def start(config, limits):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on loading")

    monkeypatch.setattr(run.AsyncLLM, "start", start)
    monkeypatch.setattr(run, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(logging.getLogger("sametoken"), "setLevel", lambda level: None)
    # Process 1 of a container ignores a signal that it does not handle.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with bind(CONFIG) as listener, pytest.raises(SystemExit) as ended:
            run.run(EngineConfig(), ServingLimits(), CONFIG, listener)
    finally:
        assert signal.signal(signal.SIGTERM, before) == signal.SIG_IGN
    assert ended.value.code == 0


async def test_clients_can_connect_once_the_log_says_that_the_server_started(caplog):
    config = replace(CONFIG, log_level="info")
    engine = DrainedEngine()
    server = DrainingServer(create_app(engine, config), engine, config)
    with bind(config) as listener:
        seen = []

        def connect(record: logging.LogRecord) -> bool:
            if "startup complete" in record.getMessage():
                socket.create_connection(listener.getsockname(), timeout=5).close()
                seen.append(record)
            return True

        logging.getLogger("uvicorn.error").addFilter(connect)
        try:
            server.should_exit = True
            await server.serve(sockets=[listener])
        finally:
            logging.getLogger("uvicorn.error").removeFilter(connect)
    assert len(seen) == 1


def test_idle_connections_outlive_those_of_clients_and_proxies():
    """Else a client sends on one that is just being closed, and its request is lost."""
    engine = DrainedEngine()
    server = DrainingServer(create_app(engine, CONFIG), engine, CONFIG)
    assert server.config.timeout_keep_alive > httpx.Limits().keepalive_expiry
    # What nginx and the balancers of the large clouds take.
    assert server.config.timeout_keep_alive > 60

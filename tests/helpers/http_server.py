"""A real server on a real socket: uvicorn in a thread, the engine in its own process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.serving.async_llm import AsyncLLM
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.listen import bind
from sametoken.serving.http.run import DrainingServer
from sametoken.serving.limits import ServingLimits

TOY_ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 16,
    "num_kv_blocks": 1024,
    "block_size": 8,
    "prefill_chunk_size": 32,
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def write_certificate(folder: Path) -> dict[str, str]:
    """A certificate of its own and its key, as a server's options name them."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return {"ssl_certfile": cert, "ssl_keyfile": key}


class TrainerClient:
    """Requests of a trainer to the server at ``url``, and what it says."""

    def __init__(self, url: str) -> None:
        # An engine that sleeps answers no prompt, for however long.
        self.url, self._http = url, httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body: dict | None = None, status: int = 200) -> dict:
        answer = self._http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def refused(self, path: str, body: dict | None = None) -> str:
        return self.post(path, body, 400)["error"]["message"]

    def get(self, path: str) -> dict:
        return self._http.get(path).json()

    def answer(self, prompt: str | list[int], sampling: dict) -> tuple[tuple[int, ...], list[int]]:
        """Token ids and versions."""
        body = {"prompt": prompt, "return_token_ids": True, **sampling}
        choice = self.post("/v1/completions", body)["choices"][0]
        return tuple(choice["token_ids"]), choice["weight_versions"]

    @property
    def version(self) -> int:
        return int(self.get("/weight_info")["weight_version"])

    def close(self) -> None:
        self._http.close()


class RunningServer:
    """A server that answers at ``url``."""

    def __init__(
        self, config: EngineConfig, server: ServerConfig, limits: ServingLimits, build
    ) -> None:
        self._config, self._server_config, self._limits = config, server, limits
        self._build = build
        self._listener = bind(server)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(600)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.server.begin_drain)
        self._thread.join(600)
        assert not self._thread.is_alive()
        self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = await AsyncLLM.start(self._config, self._limits, build=self._build)
        try:
            app = create_app(self.engine, self._server_config)
            self.server = DrainingServer(app, self.engine, self._server_config)
            serving = asyncio.ensure_future(self.server.serve(sockets=[self._listener]))
            while not self.server.started and not serving.done():
                await asyncio.sleep(0.01)
            self._started.set()
            await serving
        finally:
            await self.engine.shutdown()


@contextmanager
def running_app(app: FastAPI) -> Iterator[str]:
    """The address of an application that is served by a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def running_server(
    model: Path,
    limits: ServingLimits | None = None,
    engine: dict | None = None,
    build=build_engine,
    **options,
) -> Iterator[RunningServer]:
    """A server for a test, drained at the end.

    Args:
        model: checkpoint directory.
        limits: what is bounded.
        engine: options of the engine in place of the toy's.
        build: makes the engine in its process.
        options: of the server.
    """
    config = EngineConfig.from_options(model=str(model), **(TOY_ENGINE | (engine or {})))
    server_config = ServerConfig(**{"port": 0, "log_level": "warning"} | options)
    server = RunningServer(config, server_config, limits or ServingLimits(), build)
    server.start()
    try:
        yield server
    finally:
        server.stop()

"""Connections that say little, or slowly, or too much, before and after a key is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import signal
import ssl
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn.server
from fastapi.testclient import TestClient

from helpers.budgets import heartbeat, resident_bytes
from helpers.fake_engine import FakeEngine
from helpers.http_server import write_certificate
from sametoken.serving.http import connections, middleware
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.listen import bind
from sametoken.serving.http.middleware import Buckets
from sametoken.serving.http.run import DrainingServer

HALF = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Half: "
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
#: More than is kept of later requests during an answer, and than a system's buffers hold.
TOO_MUCH = HEALTH * 500_000
#: Seconds that nothing here takes on an idle machine; what is measured is a tenth of it or less.
SOON = 5.0


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    """Clients here need no time to take in an answer, and no server waits before it ends."""
    monkeypatch.setattr(connections, "_LINGER_S", 0.05)
    impatient = SimpleNamespace(**vars(asyncio) | {"sleep": lambda _: asyncio.sleep(0.01)})
    monkeypatch.setattr(uvicorn.server, "asyncio", impatient)


def client_of(engine=None, **options) -> TestClient:
    app = create_app(engine or FakeEngine(), ServerConfig(**options))
    return TestClient(app, raise_server_exceptions=False)


class Door:
    """The address of a server, and all connections to it that a test has opened."""

    def __init__(self, *address) -> None:
        self._address = address
        self.port = address[1]
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self, **options) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._address, **options)
        self._writers.append(writer)
        return reader, writer

    async def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """The answer to one request on a connection of its own, which then is left."""
        reader, writer = await self.open()
        writer.write(request)
        answered = await answer(reader)
        writer.close()
        return answered

    async def leave(self) -> None:
        """End all connections."""
        for writer in self._writers:
            # In Python 3.11 a transport that sent the rest after its close can no more be aborted.
            if writer.get_extra_info("socket").fileno() >= 0:
                writer.transport.abort()
        # Sockets are closed in the loop's next turns.
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(app=None, **options):
    """The door of a server on a socket, of the application over a fake engine or of another."""
    config = ServerConfig(**{"port": 0, "log_level": "warning"} | options)
    engine = FakeEngine()
    server = DrainingServer(app or create_app(engine, config), engine, config)
    with bind(config) as listener:
        door = Door(*listener.getsockname())
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield door
        finally:
            await door.leave()
            server.handle_exit(signal.SIGINT, None)
            await asyncio.wait_for(task, 30)


def post(path: str, length: int, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json")
    return "\r\n".join((*lines, *headers, f"Content-Length: {length}", "", "")).encode()


async def answer(reader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON)).decode("latin-1")
    status, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), SOON)
    return int(status.split()[1]), headers, body


async def ended(reader, within_s: float = SOON) -> bool:
    """Whether the server ends a connection."""
    try:
        async with asyncio.timeout(within_s):
            while await reader.read(65536):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def refused(reader) -> bool:
    """Whether the next answer refuses what is no request, and ends the connection."""
    status, _, body = await answer(reader)
    kind = json.loads(body)["error"]["type"]
    return (status, kind) == (400, "invalid_request_error") and await ended(reader)


async def test_half_sent_headers_make_room_for_a_neighbour():
    async with serving(max_connections=40, header_timeout=600.0) as door:
        held = []
        for _ in range(120):
            held.append(await door.open())
            held[-1][1].write(HALF)
        began = time.monotonic()
        assert (await door.ask(HEALTH))[0] == 200
        assert time.monotonic() - began < 1.0
        # The first of them, so that no more than 40 are open.
        assert all(await asyncio.gather(*(ended(reader) for reader, _ in held[:80])))


def answering(may_answer: asyncio.Semaphore, begun: list[str]):
    """An application that answers a request for each release."""

    async def application(scope, receive, send):
        if scope["type"] != "http":
            return
        begun.append(scope["path"])
        await may_answer.acquire()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    return application


async def test_requests_at_work_are_not_given_up_for_new_connections():
    may_answer, begun = asyncio.Semaphore(0), []
    async with serving(answering(may_answer, begun), max_connections=3) as door:
        held = [await door.open() for _ in range(3)]
        for _, writer in held:
            writer.write(HEALTH)
        while len(begun) < 3:
            await asyncio.sleep(0.005)
        late, writer = await door.open()
        assert await ended(late)
        for _ in held:
            may_answer.release()
        assert [(await answer(reader))[0] for reader, _ in held] == [200] * 3
        # They wait again, so another one gets in.
        assert not await ended((await door.open())[0], 0.05)


@pytest.mark.parametrize("ahead", [b"", b"\r\n", HEALTH, TOO_MUCH], ids=len)
async def test_who_leaves_is_noticed_whatever_was_sent_ahead(ahead):
    engine = FakeEngine("x", endless=True)
    body = b'{"prompt": "x", "max_tokens": 500}'
    async with serving(create_app(engine, ServerConfig())) as door:
        _, writer = await door.open()
        writer.write(post("/v1/completions", len(body)) + body)
        async with asyncio.timeout(SOON):
            while not engine.seen:
                await asyncio.sleep(0.01)
            writer.write(ahead)
            await asyncio.sleep(0.05)
            writer.close()
            while not engine.aborted:
                await asyncio.sleep(0.01)


async def test_too_much_ahead_is_forgotten_and_the_answer_ends_the_connection():
    may_answer = asyncio.Semaphore(0)
    async with serving(answering(may_answer, [])) as door:
        reader, writer = await door.open()
        writer.write(HEALTH)
        await asyncio.sleep(0.05)
        writer.write(TOO_MUCH)
        async with asyncio.timeout(SOON):
            await writer.drain()
        may_answer.release()
        status, headers, body = await answer(reader)
        assert (status, headers["connection"], body) == (200, "close", b"ok")
        assert await ended(reader)


async def test_what_was_answered_does_not_count_as_ahead(monkeypatch):
    monkeypatch.setattr(connections, "_MAX_AHEAD", 3 * len(HEALTH))
    may_answer = asyncio.Semaphore(0)
    async with serving(answering(may_answer, [])) as door:
        reader, writer = await door.open()
        writer.write(HEALTH)
        for _ in range(8):
            await asyncio.sleep(0.02)
            writer.write(HEALTH)
            await asyncio.sleep(0.02)
            may_answer.release()
            status, headers, _ = await answer(reader)
            assert (status, headers.get("connection")) == (200, None)
        # The last request, without which the server would end after its patience alone.
        may_answer.release()
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first", "next"])
@pytest.mark.parametrize("drip", [b"x", b"\r\n"], ids=["header", "blank"])
async def test_headers_must_come_in_time_however_they_drip(before, drip):
    async with serving(header_timeout=0.4) as door:
        reader, writer = await door.open()
        writer.write(before)
        if before:
            assert (await answer(reader))[0] == 200
        writer.write(HALF if drip == b"x" else drip)
        began = time.monotonic()
        closed = asyncio.ensure_future(ended(reader))
        while not closed.done() and time.monotonic() - began < SOON:
            writer.write(drip)
            await asyncio.sleep(0.02)
        assert await closed
        assert time.monotonic() - began < SOON


async def test_a_body_must_come_in_time():
    async with serving(body_timeout=0.3) as door:
        reader, writer = await door.open()
        writer.write(post("/v1/completions", 20) + b'{"prompt": "x"   }'[:-1])
        status, headers, body = await answer(reader)
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert await ended(reader)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (post("/v1/completions", 10**7), 401),
        (post("/v1/completions", 10**7, "Expect: 100-continue"), 401),
        (post("/health", 10**7), 405),
        (post("/nowhere", 10**6, "Authorization: Bearer key"), 408),
        (post("/v1/models", 10**7).replace(b"POST", b"DELETE"), 401),
        (post("/health", 10**7).replace(b"POST", b"GET"), 200),
        (post("/v1/completions", 10**9, "Authorization: Bearer key"), 413),
    ],
)
async def test_answers_come_before_bodies_and_end_the_connection(head, status):
    """The rest is not read: not as a body, and not as anything else."""
    async with serving(api_key=("key",), body_timeout=0.3) as door:
        reader, writer = await door.open()
        writer.write(head + b"{")
        answered = await answer(reader)
        assert (answered[0], answered[1].get("connection")) == (status, "close")
        assert await ended(reader)


async def test_bodies_that_no_path_takes_are_not_kept():
    size = 16 * 10**6

    async def send(door) -> None:
        reader, writer = await door.open()
        writer.write(post("/health", size))
        answered = asyncio.ensure_future(answer(reader))
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1.0):
                for _ in range(size // 10**5 - 1):
                    writer.write(bytes(10**5))
                    await writer.drain()
        assert (await answered)[0] == 405

    async with serving(api_key=("key",)) as door:
        before = resident_bytes()
        await asyncio.gather(*(send(door) for _ in range(6)))
        assert resident_bytes() - before < 40_000_000


async def test_large_bodies_share_what_there_is_and_small_ones_get_through():
    large, small = 10**6, b'{"prompt": "x", "max_tokens": 1}'
    padded = small + b" " * (large - len(small))
    async with serving(
        max_request_bytes=large, max_bodies_bytes=2 * large, body_timeout=600.0
    ) as door:
        held = []
        for _ in range(2):
            held.append(await door.open())
            held[-1][1].write(post("/v1/completions", large) + padded[:-1])
            await held[-1][1].drain()
        await asyncio.sleep(0.2)
        refused = await door.ask(post("/v1/completions", large))
        assert (refused[0], json.loads(refused[2])["error"]["code"]) == (503, "overloaded")
        assert int(refused[1]["retry-after"]) >= 1
        request = post("/v1/completions", len(small)) + small
        assert (await door.ask(request))[0] == 200
        # Those that left give back what they held, and so do those that were answered.
        held[0][1].close()
        held[1][1].write(padded[-1:])
        assert (await answer(held[1][0]))[0] == 200
        for _ in range(4):
            whole = post("/v1/completions", large) + padded
            assert (await door.ask(whole))[0] == 200


async def endless(scope, receive, send):
    """An answer without an end."""

    async def left():
        while (await receive())["type"] != "http.disconnect":
            pass

    if scope["type"] != "http":
        return
    gone = asyncio.ensure_future(left())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not gone.done():
        await send({"type": "http.response.body", "body": bytes(32768), "more_body": True})
        await asyncio.sleep(0)
    finished.append(scope["path"])


finished: list[str] = []


async def test_who_reads_nothing_is_let_go_and_who_reads_slowly_is_not():
    finished.clear()
    async with serving(endless, write_timeout=1.5) as door:
        readers = []
        for path in (b"/none", b"/slow"):
            reader, writer = await door.open(limit=4096)
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            readers.append(reader)
        began = time.monotonic()
        while "/none" not in finished and time.monotonic() - began < 3 * SOON:
            assert await readers[1].read(65536)
            await asyncio.sleep(0.002)
        assert finished == ["/none"]
        assert await readers[1].read(65536)


async def test_many_tiny_pieces_are_refused():
    async with serving() as door, heartbeat() as heart:
        reader, writer = await door.open()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"1\r\n \r\n" * 20_000)
        assert await refused(reader)
    assert heart.longest_s < 1.0


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http://x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_a_proxy_may_read_as_another_request_is_refused(head):
    async with serving() as door:
        reader, writer = await door.open()
        writer.write(head)
        assert await refused(reader)


@pytest.mark.parametrize(
    "nonsense",
    [
        post("/v1/models", 10).replace(b"Content-Length: 10", b"Transfer-Encoding: chunked")
        + b"z\r\n",
        b"\x16\x03\x01 not HTTP\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        HEALTH + b"nonsense\r\n\r\n",
    ],
)
def test_what_is_no_http_leaves_no_traceback(nonsense, caplog):
    async def main():
        async with serving(api_key=("key",)) as door:
            reader, writer = await door.open()
            for start in range(0, len(nonsense), 3000):
                writer.write(nonsense[start : start + 3000])
                await asyncio.sleep(0.02)
            assert await ended(reader)

    asyncio.run(main())
    assert [record for record in caplog.records if record.exc_info] == []


async def test_headers_have_one_limit_in_one_piece_or_in_several():
    request = post("/v1/completions", 2, "X: " + "x" * 17_000) + b"{}"
    async with serving() as door:
        for pieces in ((request,), (request[:9_000], request[9_000:])):
            reader, writer = await door.open()
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.02)
            status, _, body = await answer(reader)
            assert (status, b"headers of 16 KiB" in body) == (400, True)


def test_wrong_keys_are_slowed_down_and_the_right_one_is_not(monkeypatch):
    # No key is forgiven while the test goes on.
    monkeypatch.setattr(middleware, "Buckets", lambda rate: Buckets(rate, now=lambda: 0.0))
    client = client_of(api_key=("right",))
    wrong = [
        client.get("/v1/models", headers={"Authorization": f"Bearer {guess}"})
        for guess in range(70)
    ]
    statuses = [one.status_code for one in wrong]
    assert statuses == [401] * 60 + [429] * 10
    assert int(wrong[-1].headers["retry-after"]) >= 1
    right = {"Authorization": "Bearer right"}
    assert client.get("/v1/models", headers=right).status_code == 200


def test_no_path_of_a_file_leaves_the_server():
    engine = FakeEngine()
    secret = Path("/secret/place/model")
    fields = {name: getattr(engine.resolved, name) for name in engine.resolved.__slots__}
    engine.resolved = type(engine.resolved)(
        **fields | {"model": str(secret), "model_path": str(secret)}
    )
    client = client_of(engine, served_model_name=("small",))
    engine.errored = FileNotFoundError(2, "No such file", str(secret))
    for path in ("/v1/models", "/v1/models/small", "/v1/models/none", "/health", "/metrics"):
        assert "secret" not in client.get(path).text


async def test_handshakes_that_never_end_make_room_too(tmp_path):
    files = write_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=files["ssl_certfile"])
    trusted.check_hostname = False
    async with serving(**files, max_connections=4, header_timeout=600.0) as door:
        held = [await door.open() for _ in range(10)]
        reader, writer = await door.open(ssl=trusted)
        writer.write(HEALTH)
        assert (await answer(reader))[0] == 200
        assert all(await asyncio.gather(*(ended(one) for one, _ in held[:6])))
    async with serving(**files, header_timeout=0.3) as door:
        reader, writer = await door.open()
        assert await ended(reader)


CLIENT = """
import contextlib, resource, socket, sys, time

# The server's limit is not the client's.
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
input()
address = "127.0.0.1", int(sys.argv[1])
held = []
for _ in range(300):
    held.append(socket.create_connection(address))
    with contextlib.suppress(ConnectionError):
        held[-1].sendall(b"GET /health HTTP/1.1\\r\\nHost: a\\r\\nX-Half: ")
for _ in range(3):
    began = time.monotonic()
    with socket.create_connection(address, timeout=20) as neighbour:
        neighbour.sendall(b"GET /health HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        assert neighbour.recv(12) == b"HTTP/1.1 200"
    print(time.monotonic() - began)
"""


@contextlib.contextmanager
def few_descriptors():
    """Room for 80 descriptors more than this process has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/dev/fd")}
    free = (number for number in range(soft) if number not in used)
    most = next(itertools.islice(free, 80, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("known", [True, False])
def test_few_descriptors_end_neither_the_server_nor_the_disk(known, caplog):
    """Known to the server when it starts, or all of a sudden."""

    async def main():
        with few_descriptors() if known else contextlib.nullcontext():
            async with serving() as door:
                pipe = asyncio.subprocess.PIPE
                client = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", CLIENT, str(door.port)), stdin=pipe, stdout=pipe
                )
                with contextlib.nullcontext() if known else few_descriptors():
                    async with asyncio.timeout(40):
                        output, _ = await client.communicate(b"\n")
        seconds = [float(line) for line in output.split()]
        assert len(seconds) == 3
        assert max(seconds) < (1.0 if known else 5.0)

    asyncio.run(main())
    formatter = logging.Formatter()
    assert sum(len(formatter.format(record)) for record in caplog.records) < 10_000

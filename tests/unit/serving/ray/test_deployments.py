from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from ray.exceptions import ActorDiedError, ActorUnavailableError

from helpers.fake_engine import FakeEngine
from sametoken.config import EngineConfig
from sametoken.errors import EngineDeadError
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.errors import ApiError
from sametoken.serving.http.in_process import AppRequest
from sametoken.serving.http.middleware import BodyBounds
from sametoken.serving.limits import ServingLimits
from sametoken.serving.ray import deployments as gateway
from sametoken.serving.ray.deployments import REPLICA_HEADER, Forwarded, Gateway, Replica
from sametoken.types.sampling_params import replica_seed

BOUNDS = BodyBounds(1000, 10**6, 60.0)


class Messages:
    """What one replica answers, as Serve's handle gives it; an exception is raised."""

    def __init__(self, script: list) -> None:
        self._script = iter(script)
        self.is_cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        for item in self._script:
            if isinstance(item, Exception):
                raise item
            return item
        raise StopAsyncIteration

    def cancel(self):
        self.is_cancelled = True


class Handle:
    """Serve's handle of replicas, each attempt with a script of its own."""

    def __init__(self, *scripts: list) -> None:
        self.scripts = list(scripts)
        self.seen: list[Forwarded] = []
        self.given: list[Messages] = []

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    @property
    def respond(self) -> Handle:
        return self

    def remote(self, forwarded: Forwarded) -> Messages:
        self.seen.append(forwarded)
        self.given.append(Messages(self.scripts.pop(0)))
        return self.given[-1]


def start(status: int = 200, replica: str = "r0") -> dict:
    headers = [(b"content-type", b"text/plain"), (REPLICA_HEADER, replica.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: bytes, more: bool = False) -> dict:
    return {"type": "http.response.body", "body": text, "more_body": more}


@pytest.fixture
def client(monkeypatch) -> Callable[[Handle], TestClient]:
    monkeypatch.setattr(gateway, "_DELAYS_S", (0.0, 0.0))
    with ExitStack() as stack:

        def make(handle: Handle) -> TestClient:
            app = Gateway(handle, BOUNDS, "/under").__serve_build_asgi_app__()
            return stack.enter_context(TestClient(app))

        yield make


def test_a_request_arrives_whole_and_its_answer_returns(client):
    handle = Handle([start(), body(b"one ", more=True), body(b"two")])
    prompt = json.dumps({"prompt": "a" * 600})
    answer = client(handle).post("/v1/completions?x=1", content=prompt, headers={"k": "v"})
    assert (answer.status_code, answer.text) == (200, "one two")
    assert answer.headers["x-sametoken-replica"] == "r0"
    (forwarded,) = handle.seen
    request = forwarded.request
    assert (request.method, request.path, request.query) == ("POST", "/v1/completions", b"x=1")
    assert (request.body.decode(), request.root_path) == (prompt, "/under")
    # By which a replica counts requests.
    assert request.client == ("testclient", 50000)
    assert (b"k", b"v") in request.headers
    assert len(forwarded.keys) == 1
    assert handle.given[0].is_cancelled, "Serve is told that the answer was read"


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("gone", b"0" * 16)])
@pytest.mark.parametrize("before", [[], [start()]])
def test_a_request_whose_replica_dies_is_sent_again(client, error, before):
    handle = Handle([*before, error], [start(), body(b"ok")])
    answer = client(handle).post("/v1/completions", content=b"{}")
    assert (answer.status_code, answer.text) == (200, "ok")
    assert handle.seen[0] == handle.seen[1]


def test_a_replica_without_an_engine_is_avoided(client):
    handle = Handle(
        [start(503, "r1"), body(b"no")], [start(503, "r2"), body(b"no")], [start(), body(b"ok")]
    )
    assert client(handle).post("/v1/completions", content=b"{}").text == "ok"
    assert [sorted(one.avoided) for one in handle.seen] == [[], ["r1"], ["r1", "r2"]]


def test_the_last_answer_counts_whatever_it_is(client):
    handle = Handle(*[[start(503), body(b"no %d" % i)] for i in range(3)])
    answer = client(handle).post("/v1/completions", content=b"{}")
    assert (answer.status_code, answer.text) == (503, "no 2")


@pytest.mark.parametrize(("method", "status"), [("GET", 503), ("POST", 429), ("POST", 500)])
def test_other_answers_pass_at_once(client, method, status):
    handle = Handle([start(status), body(b"no")])
    assert client(handle).request(method, "/ready").status_code == status


def test_no_replica_at_all_is_an_error_of_ours(client):
    answer = client(Handle(*[[ActorDiedError()]] * 3)).post("/v1/completions", content=b"{}")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    assert answer.headers["retry-after"]


def test_a_stream_that_has_begun_ends_in_an_error(client):
    handle = Handle([start(), body(b'data: {"i": 0}\n\n', more=True), ActorDiedError()])
    answer = client(handle).post("/v1/completions", content=b"{}")
    first, error, done, _ = answer.text.split("\n\n")
    assert (first, done) == ('data: {"i": 0}', "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert len(handle.seen) == 1


def test_a_message_s_stream_ends_in_an_error_that_its_clients_see(client):
    """They pass over events without a name."""
    handle = Handle([start(), body(b"event: ping\ndata: {}\n\n", more=True), ActorDiedError()])
    answer = client(handle).post("/v1/messages", content=b"{}")
    _, error, _ = answer.text.split("\n\n")
    name, data = error.splitlines()
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")


def test_errors_of_the_replica_s_code_are_not_repeated(client):
    handle = Handle([ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        client(handle).post("/v1/completions", content=b"{}")
    assert len(handle.seen) == 1


def test_a_body_that_is_too_large_goes_nowhere(client):
    handle = Handle()
    answer = client(handle).post("/v1/completions", content=b"a" * (BOUNDS.max_bytes + 1))
    assert answer.status_code == 413
    assert ApiError(413, "").body["error"]["type"] == answer.json()["error"]["type"]
    assert not handle.seen


class Own(Replica):
    def __del__(self) -> None:
        """Ray awaits it; nobody would here."""


def context(rank: int) -> SimpleNamespace:
    """Ray's, of a replica."""
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id="r7"), rank=SimpleNamespace(rank=rank)
    )


async def test_replicas_draw_seeds_of_their_own(monkeypatch):
    """Answers of equal prompts without a seed differ, whichever replicas they reach."""
    seeds = []

    async def begin(config: EngineConfig, limits: ServingLimits) -> FakeEngine:
        seeds.append(config.seed)
        return FakeEngine("hello")

    monkeypatch.setattr(gateway.AsyncLLM, "start", begin)
    for rank in range(3):
        monkeypatch.setattr(gateway.serve, "get_replica_context", lambda rank=rank: context(rank))
        config = EngineConfig(seed=7)
        await Replica.__init__(object.__new__(Own), config, ServingLimits(), ServerConfig())
    assert seeds == [replica_seed(7, rank) for rank in range(3)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


async def test_a_replica_names_itself_is_replaced_without_an_engine_and_ends_it(monkeypatch):
    class Engine(FakeEngine):
        has_ended = False

        async def shutdown(self) -> None:
            self.has_ended = True

    engine = Engine("hello")

    async def begin(config: EngineConfig, limits: ServingLimits) -> Engine:
        return engine

    monkeypatch.setattr(gateway.serve, "get_replica_context", lambda: context(0))
    monkeypatch.setattr(gateway.AsyncLLM, "start", begin)
    replica = object.__new__(Own)
    await Replica.__init__(replica, EngineConfig(), ServingLimits(), ServerConfig())
    request = AppRequest("GET", "/ready")
    messages = [one async for one in replica.respond(Forwarded(request, ()))]
    assert (REPLICA_HEADER, b"r7") in messages[0]["headers"]
    await replica.check_health()
    engine.is_ready = False
    with pytest.raises(EngineDeadError, match="takes no requests"):
        await replica.check_health()
    await Replica.__del__(replica)
    assert engine.has_ended

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from sametoken.serving.http import middleware
from sametoken.serving.http.middleware import (
    OPEN_PATHS,
    Authentication,
    BodyBounds,
    BodyLimit,
    Buckets,
    RateLimit,
)

BOUNDS = BodyBounds(max_bytes=10**6, max_total_bytes=10**6, timeout_s=60.0)
KEY = {"Authorization": "Bearer right"}


def test_only_holders_of_a_key_use_the_model(serve):
    client = serve(api_key=("other", "right"))
    answers = [
        client.get("/v1/models", headers=headers).status_code
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "right"},
            {"x-api-key": "wrong"},
            {"x-api-key": "right", "Authorization": "Bearer wrong"},
            {"x-api-key": "right"},
            KEY,
        )
    ]
    assert answers == [401, 401, 401, 401, 401, 200, 200]
    refused = client.post("/tokenize", json={"prompt": "x"})
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    # Claude Code tries a refused key again, ten times, unless it is told not to.
    assert refused.headers["x-should-retry"] == "false"
    assert all(client.get(path).status_code == 200 for path in OPEN_PATHS)
    assert client.get("/assets/page.css").status_code == 200
    assert client.get("/assets/../v1/models").status_code in (401, 404)
    assert client.get("/anything").status_code == 401


def test_the_key_is_needed_behind_a_proxy_s_path_too(serve):
    client = serve(api_key=("right",), root_path="/llm")
    assert client.get("/llm/v1/models").status_code == 401
    assert client.get("/v1/models").status_code == 401
    assert client.get("/llm/v1/models", headers=KEY).status_code == 200
    assert client.get("/llm/health").status_code == 200
    assert client.get("/llm/assets/page.css").status_code == 200


def test_rates_are_bounded_and_refill(serve):
    client = serve(rate_limit=2)
    answers = [client.get("/v1/models") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert client.get("/health").status_code == 200


def test_a_wait_below_a_second_is_told_as_the_header_has_it(serve, monkeypatch):
    monkeypatch.setattr(Buckets, "take", lambda limit, client: 0.2)
    refused = serve(rate_limit=1).get("/v1/models")
    assert refused.headers["retry-after"] == "1"
    assert "Try again after 1 s" in refused.json()["error"]["message"]


def test_keys_have_rates_of_their_own(serve):
    client = serve(rate_limit=1, api_key=("right", "other"))
    other = {"Authorization": "Bearer other"}
    answers = [client.get("/v1/models", headers=h).status_code for h in (KEY, other, KEY)]
    assert answers == [200, 200, 429]


def statuses(
    app, parts: list[bytes], path: str = "/tokenize", end: str = "http.request"
) -> list[int]:
    """Those that an ASGI application sends for a body in parts."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": end, "body": b"", "more_body": False})
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(app(scope | {"client": ("1.2.3.4", 1)}, receive, send))
    return [status for status in sent if status is not None]


async def accept(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})


def test_a_bucket_refills_evenly():
    clock = [0.0]
    limit = RateLimit(accept, 60, by_key=False, now=lambda: clock[0])
    assert [statuses(limit, []) for _ in range(61)].count([429]) == 1
    clock[0] = 1.5
    assert [statuses(limit, []) for _ in range(2)] == [[204], [429]]
    clock[0] = 1000.0
    assert [statuses(limit, []) for _ in range(61)].count([429]) == 1


def test_the_clients_that_were_seen_last_are_remembered(monkeypatch):
    monkeypatch.setattr(middleware, "_MAX_CLIENTS", 2)
    buckets = Buckets(1, now=lambda: 0.0)
    assert [buckets.take(client) > 0 for client in "abacab"] == [
        False, False, True, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused(serve, chunked):
    client = serve(max_request_bytes=200)

    def body(size):
        text = b'{"prompt": "' + b"x" * size + b'"}'
        return iter([text[:50], text[50:]]) if chunked else text

    headers = {"Content-Type": "application/json"}
    assert client.post("/tokenize", content=body(100), headers=headers).status_code == 200
    refused = client.post("/tokenize", content=body(300), headers=headers)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"


def test_a_client_that_goes_while_sending_asks_for_nothing():
    bodies = []

    async def app(scope, receive, send):
        bodies.append(await receive())

    async def receive():
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": []}
    asyncio.run(BodyLimit(app, BOUNDS)(scope, receive, None))
    assert bodies == []


def test_bodies_that_are_held_count_until_they_are_answered():
    inner = []
    large = [bytes(600_000)]

    async def app(scope, receive, send):
        body = (await receive())["body"]
        inner.append(len(body))
        if len(inner) == 1:
            inner.append(await asyncio.to_thread(statuses, limit, large))
            inner.append(await asyncio.to_thread(statuses, limit, [bytes(60_000)]))
        await send({"type": "http.response.start", "status": 204, "headers": []})

    limit = BodyLimit(app, BOUNDS)
    assert statuses(limit, large) == [204]
    assert inner == [600_000, [503], 60_000, [204]]
    # Nothing is left of them, whatever became of each.
    assert statuses(limit, [bytes(400_000)] * 3) == [413]
    assert statuses(limit, large, end="http.disconnect") == []
    assert statuses(limit, large) == [204]


def test_the_memory_of_a_body_is_not_doubled():
    """Not while it comes, nor when it is handed on."""
    size, peak = 10**7, []
    part = bytes(10**5)

    async def app(scope, receive, send):
        body = (await receive())["body"]
        peak.append(tracemalloc.get_traced_memory()[1])
        assert len(body) == size

    tracemalloc.start()
    try:
        limit = BodyLimit(app, BodyBounds(2 * size, 2 * size, 60.0))
        statuses(limit, [part] * 100)
    finally:
        tracemalloc.stop()
    assert peak[0] < 1.5 * size


def test_no_body_is_read_where_none_belongs():
    assert statuses(BodyLimit(accept, BOUNDS), [bytes(10**7)], "/health") == [204]


def test_other_protocols_pass():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    for layer in (
        Authentication(app, ["key"]),
        RateLimit(app, 1, by_key=True),
        BodyLimit(app, BOUNDS),
    ):
        asyncio.run(layer({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"] * 3


def test_origins(serve):
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    open_to = serve(allowed_origins=("http://a.example",), api_key=("right",))
    allowed = open_to.options("/v1/models", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "http://a.example"
    refused = open_to.get("/v1/models", headers={"Origin": "http://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://a.example"
    assert "access-control-allow-origin" not in serve().get("/v1/models", headers=asked).headers

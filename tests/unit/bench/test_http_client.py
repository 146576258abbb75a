"""Answers without end: what reads one whole stops at a bound."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from sametoken.audit import servers
from sametoken.audit.asks import AuditRequest
from sametoken.bench import http_client
from sametoken.bench.http_client import get
from sametoken.bench.openai_stream import Endpoint, ServedRequest, send
from sametoken.bench.scrape import scrape
from sametoken.errors import RequestError


async def endless():
    """A body of which no reader may want more than 1100 bytes."""
    for _ in range(11):
        yield 100 * b" "
    raise AssertionError("it was read to its end")


@pytest.fixture
def client(monkeypatch):
    """A client of a server that ends no answer; the one to ``/error`` is no success."""
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 1000)

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500 if request.url.path == "/error" else 200, content=endless())

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server")


async def test_an_endless_body_is_refused(client):
    with pytest.raises(RequestError, match="HTTP 200: the body has more than 1000 bytes"):
        await get(client, "/v1/models")


async def test_endless_metrics_are_none(client):
    assert await scrape(client) is None


async def test_an_endless_refusal_is_one_failure(client):
    record = ServedRequest(0, 0.0)
    await send(client, Endpoint("/error", "m", is_chat=False), {}, record)
    assert record.error == "HTTP 500: the body has more than 1000 bytes"


@pytest.mark.parametrize("model", [None, "m"])
def test_an_endless_list_of_models_or_completion_ends_an_audit(client, monkeypatch, model):
    monkeypatch.setattr(servers.Server, "client", lambda server: client)
    server = servers.Server("http://server", model)
    with pytest.raises(RequestError, match="the body has more than 1000 bytes"):
        servers.query_server(server, [AuditRequest("a", (), "a", 0.0, 0, 1)], concurrency=1)


def test_a_body_of_as_many_bytes_as_may_be_is_read(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 100)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=100 * b"a"))
    client = httpx.AsyncClient(transport=transport, base_url="http://server")
    assert asyncio.run(get(client, "/")) == 100 * b"a"

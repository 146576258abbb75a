"""Completions as servers send them."""

from __future__ import annotations

import asyncio
import json

import pytest

from sametoken.audit.asks import AuditRequest
from sametoken.audit.servers import Server, completion_body, parse_completion, query_server
from sametoken.errors import ConfigError, RequestError

# The form of vLLM's /v1/completions.
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": " a b",
            "logprobs": {
                "text_offset": [0, 2],
                "token_logprobs": [-0.5, -0.25],
                "tokens": [" a", " b"],
                "top_logprobs": [{" a": -0.5, " c": -1.5}, {" d": -2.0, " b": -0.25}],
            },
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
}


def test_a_completion_without_token_ids():
    answer = parse_completion(COMPLETION)
    assert answer.tokens == (" a", " b")
    assert answer.top[1] == ((" b", -0.25), (" d", -2.0))


def test_token_ids_are_taken_where_they_are():
    choice = COMPLETION["choices"][0] | {"token_ids": [5, 6]}
    answer = parse_completion(COMPLETION | {"choices": [choice]})
    assert (answer.tokens, answer.texts) == ((5, 6), (" a", " b"))


@pytest.mark.parametrize(
    ("ids", "logprobs", "why"),
    [
        ("56", {}, "token_ids='56'"),
        ([5, None], {}, r"token_ids=\[5, None\]"),
        ([5, True], {}, r"token_ids=\[5, True\]"),
        ([5], {}, "has 2 texts of tokens, 1 token ids and 2 positions"),
        (None, {"tokens": " a"}, "tokens=' a'"),
        (None, {"tokens": [" a", 3]}, r"tokens=\[' a', 3\]"),
        (None, {"top_logprobs": [{" a": -0.5}]}, "2 texts of tokens, 2 token ids and 1 positions"),
    ],
)
def test_malformed_tokens_are_refused(ids, logprobs, why):
    choice = COMPLETION["choices"][0]
    choice = choice | {"token_ids": ids, "logprobs": choice["logprobs"] | logprobs}
    with pytest.raises(RequestError, match=why):
        parse_completion({"choices": [choice]})


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"text": "x", "logprobs": None}]}, None]
)
def test_other_forms_are_refused(body):
    with pytest.raises(RequestError, match="logprobs"):
        parse_completion(body)


@pytest.mark.parametrize(("ids", "prompt"), [((1, 5), [1, 5]), ((), "<s>hi")])
def test_a_prompt_is_sent_as_the_ids_that_it_has(ids, prompt):
    """A server adds BOS to a text, also to one whose chat template has written it."""
    assert completion_body(AuditRequest("a", ids, "<s>hi", 0.0, 0, 1), "m")["prompt"] == prompt


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_root_of_a_url(url):
    assert Server(url).root == "http://h:1"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://Host.Example:80/v1", "http://host.example/"),
        ("https://h:443", "https://h"),
        ("http://localhost:8000", "http://127.0.0.1:8000/v1"),
        ("http://[::1]:8000", "http://0.0.0.0:8000"),
    ],
)
def test_spellings_of_one_address_are_equal(one, other):
    assert Server(one).address == Server(other).address


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://localhost:8000", "http://localhost:8001"),
        ("http://h:443", "https://h:443"),
        ("http://h/a", "http://h/b"),
        ("http://10.0.0.1", "http://127.0.0.1"),
    ],
)
def test_two_addresses_are_not_equal(one, other):
    assert Server(one).address != Server(other).address


@pytest.mark.parametrize("key", ["clé", "a b", "key\n", "\udcff"])
def test_a_key_that_no_header_holds_is_refused(key):
    with pytest.raises(ConfigError, match="the API key has"):
        Server("http://h:1", api_key=key)


@pytest.mark.parametrize("wrong", [{"model": "m\udcff"}, {"url": "http://h/\udcff"}])
def test_a_lone_surrogate_is_refused(wrong):
    with pytest.raises(RequestError, match="holds a lone surrogate"):
        Server(**{"url": "http://h:1"} | wrong)


async def test_as_many_requests_run_at_once_as_are_wanted():
    """More than the 100 of httpx's default: the server answers when all have come."""
    all_here = asyncio.Barrier(101)
    body = json.dumps(COMPLETION)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await all_here.wait()
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    asks = [AuditRequest(str(i), (5,), "", 0.0, 0, 2) for i in range(101)]
    async with await asyncio.start_server(answer, "127.0.0.1", 0, backlog=200) as listening:
        port = listening.sockets[0].getsockname()[1]
        server = Server(f"http://127.0.0.1:{port}", model="m", timeout_s=5.0)
        answers = await asyncio.to_thread(query_server, server, asks, concurrency=101)
    assert len(answers) == 101

"""Ask any OpenAI-compatible server through ``/v1/completions`` with log-probabilities.

vLLM, SGLang and llama.cpp's server answer it; token ids are used where a server returns them
(``return_token_ids``), token texts where it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sametoken.audit.asks import (
    Answer,
    Answers,
    Ask,
    TopTwo,
)
from sametoken.bench.scrape import Counters, scrape
from sametoken.errors import RequestError
from sametoken.io.json_text import parse_json

NUM_CANDIDATES = 2


@dataclass(frozen=True, slots=True)
class Server:
    """A server to ask.

    Attributes:
        url: its root, with or without ``/v1``.
        model: the name it serves; None takes the first of ``/v1/models``.
        api_key: sent as a bearer token if given.
        timeout_s: of one request.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0

    @property
    def root(self) -> str:
        """The URL without ``/v1`` and slashes at its end."""
        return self.url.rstrip("/").removesuffix("/v1")

    def client(self) -> httpx.AsyncClient:
        """A client that sends the key with every request."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.AsyncClient(base_url=self.root, headers=headers, timeout=self.timeout_s)


def ask_server(server: Server, asks: Sequence[Ask], *, concurrency: int) -> Answers:
    """Answer all asks, at most ``concurrency`` of them at once.

    Raises:
        RequestError: the server cannot be reached, refuses a request, or answers in another form.
    """
    return asyncio.run(_ask_all(server, asks, concurrency))


def read_counters(server: Server) -> Counters | None:
    """The counters of the server's ``/metrics``; None if it has none that can be read."""

    async def read() -> Counters | None:
        async with server.client() as client:
            return await scrape(client)

    return asyncio.run(read())


async def _ask_all(server: Server, asks: Sequence[Ask], concurrency: int) -> Answers:
    gate = asyncio.Semaphore(concurrency)
    async with server.client() as client:
        model = server.model or await _served_model(client)

        async def one(ask: Ask) -> Answer:
            async with gate:
                return parse_completion(await _post(client, _body(ask, model)))

        answers = await asyncio.gather(*(one(ask) for ask in asks))
    return {ask.name: answer for ask, answer in zip(asks, answers, strict=True)}


async def _served_model(client: httpx.AsyncClient) -> str:
    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(parse_json(answer.content)["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise RequestError(
            f"{client.base_url} does not list a model ({error!r})", "check the URL and the key"
        ) from error


def _body(ask: Ask, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": ask.text or list(ask.prompt_token_ids),
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "logprobs": NUM_CANDIDATES,
        "return_token_ids": True,
    }


async def _post(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Any:
    try:
        answer = await client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise RequestError(
            f"{client.base_url} cannot be reached ({error!r})", "check that the server runs"
        ) from error
    if not answer.is_success:
        raise RequestError(
            f"{client.base_url} answered {answer.status_code}: {answer.text[:300]}",
            "see the server's log; the audit needs /v1/completions with logprobs",
        )
    try:
        return parse_json(answer.content)
    except ValueError as error:
        raise RequestError(f"{client.base_url} answered no JSON", "check the URL") from error


def parse_completion(body: Any) -> Answer:
    """The answer in a completion's body.

    Raises:
        RequestError: it has another form, or no log-probabilities.
    """
    try:
        choice = body["choices"][0]
        logprobs = choice["logprobs"]
        texts = tuple(logprobs["tokens"])
        top = tuple(map(_two_best, logprobs["top_logprobs"] or ()))
        ids = choice.get("token_ids")
        tokens = tuple(ids) if ids is not None else texts
        return Answer(
            tokens, (), top, str(choice.get("finish_reason") or "length"), str(choice["text"])
        )
    except (LookupError, TypeError, ArithmeticError, AttributeError) as error:
        raise RequestError(
            f"the server's completion has no log-probabilities ({error!r})",
            "the audit needs /v1/completions with logprobs",
        ) from error


def _two_best(candidates: Mapping[str, float]) -> TopTwo:
    ranked = sorted(candidates.items(), key=lambda pair: -pair[1])
    return tuple((text, float(logprob)) for text, logprob in ranked[:NUM_CANDIDATES])

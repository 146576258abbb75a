"""Requests to an OpenAI-compatible server: ``/v1/completions`` with log-probabilities.

vLLM and SGLang have them. Answers have token ids if the server returns them
(``return_token_ids``), and always token texts.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

from sametoken.audit.asks import NUM_CANDIDATES, Answer, Answers, AuditRequest, TopTwo
from sametoken.bench.http_client import NO_LIMITS, get, read_body
from sametoken.bench.scrape import Counters, scrape
from sametoken.bench.workload import server_root
from sametoken.errors import RequestError, require_unicode, shown
from sametoken.io.bearer import bearer
from sametoken.io.json_text import parse_json

#: Hosts at which one server answers.
_LOOPBACK = ("localhost", "127.0.0.1", "0.0.0.0", "::1")


@dataclass(frozen=True, slots=True)
class Server:
    """A server to audit.

    Attributes:
        url: base URL, with or without ``/v1``.
        model: served model name; None takes the first of ``/v1/models``.
        api_key: sent as a bearer token if given.
        timeout_s: timeout of one request.

    Raises:
        ConfigError: no header can hold the key.
        RequestError: the URL or the name holds a lone surrogate.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        bearer(self.api_key)
        require_unicode("url", self.url)
        require_unicode("served_model", self.model or "")

    @property
    def root(self) -> str:
        """The URL without a trailing ``/v1`` or slash.

        Raises:
            ConfigError: it is no address.
        """
        return server_root(self.url)

    @property
    def address(self) -> httpx.URL:
        """The root, equal for spellings of one: of the host, of loopback, and the default port.

        Raises:
            ConfigError, RequestError: the URL is malformed.
        """
        url = self._parsed()
        return url.copy_with(host=_LOOPBACK[0]) if url.host in _LOOPBACK else url

    def client(self) -> httpx.AsyncClient:
        """Open a client without a connection limit that sends the key with every request.

        Raises:
            ConfigError, RequestError: the URL is malformed.
        """
        return httpx.AsyncClient(
            base_url=self._parsed(),
            headers=bearer(self.api_key),
            timeout=self.timeout_s,
            limits=NO_LIMITS,
            verify=_authorities(),
        )

    def _parsed(self) -> httpx.URL:
        try:
            return httpx.URL(self.root)
        except httpx.InvalidURL as error:
            raise RequestError(
                f"{self.url!r} is no URL ({error})", "give one as in http://127.0.0.1:8000"
            ) from error


@cache
def _authorities() -> ssl.SSLContext:
    """Trusted certificates: 50 ms of CPU time to read, so read once, not for every client."""
    return httpx.create_ssl_context()


def require_server(server: Server) -> None:
    """Check that a server answers as an audit needs it, with a request for one token.

    Raises:
        RequestError: as ``query_server``.
    """
    query_server(server, [AuditRequest("check", (), "a", 0.0, 0, 1)], concurrency=1)


def query_server(server: Server, requests: Sequence[AuditRequest], *, concurrency: int) -> Answers:
    """Send all requests, at most ``concurrency`` at once, and return the answers.

    Raises:
        RequestError: the server cannot be reached, rejects a request, or its answer is malformed.
    """
    return asyncio.run(_complete_all(server, requests, concurrency))


def read_counters(server: Server) -> Counters | None:
    """Read the counters of the server's ``/metrics``; None if they cannot be read."""

    async def read() -> Counters | None:
        async with server.client() as client:
            return await scrape(client)

    return asyncio.run(read())


async def _complete_all(
    server: Server, requests: Sequence[AuditRequest], concurrency: int
) -> Answers:
    gate = asyncio.Semaphore(concurrency)
    async with server.client() as client:
        model = server.model or await _served_model(client)

        async def one(request: AuditRequest) -> Answer:
            async with gate:
                return parse_completion(await _post(client, completion_body(request, model)))

        answers = await asyncio.gather(*(one(request) for request in requests))
    return {request.name: answer for request, answer in zip(requests, answers, strict=True)}


async def _served_model(client: httpx.AsyncClient) -> str:
    try:
        return str(parse_json(await get(client, "/v1/models"))["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise RequestError(
            f"{client.base_url} does not list a model ({error!r})", "check the URL and the key"
        ) from error


def completion_body(request: AuditRequest, model: str) -> dict[str, Any]:
    """The body of a completion's request."""
    return {
        "model": model,
        # As the text of a chat template begins with BOS, a server would add another one to it.
        "prompt": list(request.prompt_token_ids) or request.text,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "logprobs": NUM_CANDIDATES,
        "return_token_ids": True,
    }


async def _post(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Any:
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            content = await read_body(answer)
    except httpx.HTTPError as error:
        raise RequestError(
            f"{client.base_url} cannot be reached ({error!r})", "check that the server runs"
        ) from error
    if not answer.is_success:
        raise RequestError(
            f"{client.base_url} answered {answer.status_code}: "
            f"{content[:300].decode('utf-8', 'replace')}",
            "see the server's log; the audit needs /v1/completions with logprobs",
        )
    try:
        return parse_json(content)
    except ValueError as error:
        raise RequestError(f"{client.base_url} answered no JSON", "check the URL") from error


def parse_completion(body: Any) -> Answer:
    """Parse the body of a completion.

    Raises:
        RequestError: it is malformed, or has no log-probabilities.
    """
    try:
        choice = body["choices"][0]
        texts, ids = choice["logprobs"]["tokens"], choice.get("token_ids")
        top = tuple(map(_two_best, choice["logprobs"]["top_logprobs"] or ()))
    except (LookupError, TypeError, ArithmeticError, AttributeError) as error:
        raise RequestError(
            f"the server's completion has no log-probabilities ({error!r})",
            "the audit needs /v1/completions with logprobs",
        ) from error
    tokens = texts if ids is None else ids
    if not (_all_of(str, texts) and (ids is None or _all_of(int, ids))):
        raise RequestError(
            f"the server's completion has tokens={shown(texts)}, token_ids={shown(ids)}",
            "a server must send a list of texts, and if it sends token ids a list of integers",
        )
    if len(tokens) != len(texts) or len(top) not in (0, len(texts)):
        raise RequestError(
            f"the server's completion has {len(texts)} texts of tokens, {len(tokens)} token ids "
            f"and {len(top)} positions with log-probabilities",
            "a server must send one of each for every token",
        )
    return Answer(tuple(tokens), top=top, texts=tuple(texts))


def _all_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _two_best(candidates: Mapping[str, float]) -> TopTwo:
    ranked = sorted(candidates.items(), key=lambda pair: -pair[1])
    return tuple((text, float(logprob)) for text, logprob in ranked[:NUM_CANDIDATES])

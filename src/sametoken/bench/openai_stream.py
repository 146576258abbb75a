"""Streamed requests to an OpenAI-compatible server: load, arrival times, tokens and windows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import httpx

from sametoken.bench.http_client import read_body
from sametoken.bench.measure import Window
from sametoken.bench.request_stats import speculation_in
from sametoken.bench.scrape import Counters
from sametoken.errors import ConfigError, RequestError
from sametoken.io.json_text import MAX_LINE_BYTES, parse_json
from sametoken.types.option_values import require_least

_DONE = b"[DONE]"
_SHOWN_ERROR = 200
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go.

    Attributes:
        path: path of the endpoint.
        model: served model name.
        is_chat: prompts are sent as user messages, not as text to continue.
        has_stats: the server supports ``include_speculation_stats``.
        extra: further fields of every request's body.
    """

    path: str
    model: str
    is_chat: bool
    has_stats: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: str, max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """Build the body of a streamed request with usage."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        messages = {"messages": [{"role": "user", "content": prompt}]}
        body |= messages if self.is_chat else {"prompt": prompt}
        if self.has_stats:
            body["include_speculation_stats"] = True
        return body | dict(self.extra)


@dataclass(slots=True)
class ServedRequest:
    """One request as the client sees it; times in seconds of the clock.

    Attributes:
        index: its place in the run.
        arrival: when it was due.
        sent: when it was sent; after ``arrival`` if the concurrency limit was reached.
        events: arrival time of each event with text or tokens.
        texts: the text of each event.
        token_ids: the token ids of each event, if the server sends them.
        token_texts: the text of every token, if log-probabilities were requested.
        num_prompt_tokens: the server's count; None without one.
        num_tokens: the server's count, or the number of ``events`` without one.
        counted: whether the server counted.
        speculation: the server's statistics under our names; None without them.
        windows: verify steps, if the server reports them.
        finish_reason: the finish reason of the answer.
        error: why the request failed; None if it did not.
    """

    index: int
    arrival: float
    sent: float = 0.0
    events: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_tokens: int = 0
    counted: bool = False
    speculation: dict[str, Any] | None = None
    windows: tuple[Window, ...] = ()
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.events[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is no other."""
        if self.num_tokens < 2 or len(self.events) < 2:
            return None
        return (self.events[-1] - self.events[0]) / (self.num_tokens - 1)


async def send(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    body: Mapping[str, Any],
    record: ServedRequest,
    *,
    clock: Clock = time.perf_counter,
) -> None:
    """Send one request and fill in ``record``; failures become its error and are not raised."""
    record.sent = clock()
    try:
        async with client.stream("POST", endpoint.path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await read_body(response)).decode("utf-8", "replace")
                raise RequestError(f"HTTP {response.status_code}: {_message(text)}")
            ended = False
            async for event in _events(response):
                if event == _DONE:
                    ended = True
                    break
                _read_event(record, parse_json(event), clock())
        _check(record, ended)
    except (httpx.HTTPError, RequestError) as error:
        record.error = str(error) or type(error).__name__
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        record.error = f"an event is not as OpenAI has it ({type(error).__name__}: {error})"


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    async for line in _lines(response):
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip()


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines end at a line feed alone: httpx's also do inside a text with U+2028.

    Raises:
        RequestError: a line is too long.
    """
    begun = bytearray()
    async for part in response.aiter_bytes():
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield bytes(begun) + end
            begun.clear()
        begun += rest
        if len(begun) > MAX_LINE_BYTES:
            raise RequestError(f"a line of the stream has more than {MAX_LINE_BYTES} bytes")
    yield bytes(begun)


def _read_event(record: ServedRequest, event: Mapping[str, Any], now: float) -> None:
    if event.get("error"):
        raise RequestError(f"error event: {_message(json.dumps(event))}")
    for choice in event.get("choices") or ():
        text = _text(choice)
        if text or choice.get("token_ids"):
            record.events.append(now)
            record.texts.append(text)
            record.token_ids.append(list(choice.get("token_ids") or ()))
            record.token_texts += _token_texts(choice.get("logprobs") or {})
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    usage = event.get("usage")
    if usage:
        record.num_prompt_tokens = int(usage["prompt_tokens"])
        record.num_tokens = int(usage["completion_tokens"])
        record.counted = True
    if (stats := speculation_in(event)) is not None:
        record.speculation, record.windows = stats


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice: completion, reasoning, content and tool calls."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    parts = [delta.get(key) or "" for key in ("reasoning_content", "reasoning", "content")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name") or "", function.get("arguments") or ""]
    return "".join(parts)


def _token_texts(logprobs: Mapping[str, Any]) -> list[str]:
    """Return the token texts of log-probabilities, in the completion or chat format."""
    if "content" in logprobs:
        return [entry["token"] for entry in logprobs["content"] or ()]
    return list(logprobs.get("tokens") or ())


def _check(record: ServedRequest, ended: bool) -> None:
    """Require a complete answer."""
    if not ended and record.finish_reason is None:
        raise RequestError("the stream ended before the answer")
    if not record.events:
        raise RequestError("the answer held no token")
    if not record.counted:
        record.num_tokens = len(record.events)


def _message(text: str) -> str:
    """Return the message of an OpenAI error, or the beginning of the text."""
    try:
        error = parse_json(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:_SHOWN_ERROR]
    except (ValueError, KeyError, TypeError):
        return text[:_SHOWN_ERROR]


#: Sends one body and fills in the record.
Send = Callable[[Mapping[str, Any], ServedRequest], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive.

    Attributes:
        concurrency: maximum number of running requests; None sets no limit.
        request_rate: average requests per second of a Poisson process; None sends all at once.
        seed: seed of the arrival times.

    Raises:
        ConfigError: a number is impossible.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_least(self, concurrency=1)
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(
                f"request_rate={self.request_rate} is not possible", "use a number above 0"
            )

    def due(self, count: int) -> list[float]:
        """Arrival times of ``count`` requests in seconds; the first is 0."""
        if self.request_rate is None:
            return [0.0] * count
        choose = random.Random(self.seed)
        gaps = (choose.expovariate(self.request_rate) for _ in range(count - 1))
        return list(accumulate(gaps, initial=0.0))[:count]


@dataclass(slots=True)
class LoadRun:
    """The records of one run.

    Attributes:
        start: when it began, in seconds of ``time.perf_counter``.
        requests: in the order of their index.
        counters: the server's counters over the run; None if unknown.
    """

    start: float
    requests: list[ServedRequest] = field(default_factory=list)
    counters: Counters | None = None

    @property
    def done(self) -> list[ServedRequest]:
        """Requests without an error."""
        return [request for request in self.requests if request.error is None]

    @property
    def seconds(self) -> float:
        """From the start to the last token; 0 if none came."""
        return max((request.events[-1] for request in self.done), default=self.start) - self.start


async def run_load(
    send: Send, bodies: Sequence[Mapping[str, Any]], load: Load, *, advance: Callable[[], None]
) -> LoadRun:
    """Send every body when it is due, and wait for all answers.

    Args:
        send: sends one body.
        bodies: in order.
        load: arrival times and concurrency limit.
        advance: called for each finished request.
    """
    bound: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
    if load.concurrency is not None:
        bound = asyncio.Semaphore(load.concurrency)
    run = LoadRun(time.perf_counter())

    async def one(index: int, body: Mapping[str, Any], due: float) -> None:
        record = ServedRequest(index, run.start + due)
        run.requests.append(record)
        await asyncio.sleep(max(0.0, record.arrival - time.perf_counter()))
        async with bound:
            await send(body, record)
        advance()

    due = load.due(len(bodies))
    async with asyncio.TaskGroup() as tasks:
        for index, (body, at) in enumerate(zip(bodies, due, strict=True)):
            tasks.create_task(one(index, body, at))
    run.requests.sort(key=lambda record: record.index)
    return run


def traced_body(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Extend a body so that the server returns every token and window."""
    logprobs = {"logprobs": True, "top_logprobs": 0} if is_chat else {"logprobs": 0}
    more: dict[str, Any] = {"return_token_ids": True, **logprobs}
    if body.get("include_speculation_stats"):
        more["include_speculation_stats"] = "detailed"
    return {**body, **more}


def served_trace(record: ServedRequest) -> dict[str, Any] | None:
    """Convert the request to the form of ``Trace.as_json``; None if its tokens are unknown.

    Windows are the server's if it reports them. Otherwise every event of a request that ran
    alone counts as one window, whose last token is the target's and whose number of offered
    drafts is unknown (None).
    """
    token_ids = [token_id for event in record.token_ids for token_id in event]
    if record.error is not None or not token_ids or len(token_ids) != len(record.token_texts):
        return None
    if record.windows:
        windows = [asdict(window) for window in record.windows if window.first < len(token_ids)]
    else:
        lengths = [len(event) for event in record.token_ids if event]
        firsts = accumulate(lengths[:-1], initial=0)
        windows = [
            {"first": first, "num_drafts": None, "num_accepted": length - 1}
            for first, length in zip(firsts, lengths, strict=True)
        ]
    return {
        "request": f"request {record.index}",
        "token_ids": token_ids,
        "texts": record.token_texts,
        "windows": windows,
    }

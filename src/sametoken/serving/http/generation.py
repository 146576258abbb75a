"""The engine requests of one HTTP request, streamed as server-sent events or sent whole.

They begin and end together; a client's disconnect aborts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sametoken.serving.http.errors import ApiError, as_api_error
from sametoken.serving.http.response_schemas import (
    PromptTokensDetails,
    SpeculationStats,
    Usage,
    json_response,
)
from sametoken.serving.http.schemas import DETAILED, StreamOptions
from sametoken.serving.http.times import RequestTimes
from sametoken.types.outputs import CompletionOutput, RequestOutput, SpeculationMetrics

if TYPE_CHECKING:
    from sametoken.serving.request_stream import RequestStream


Result = TypeVar("Result")
#: nginx's status for a client that has disconnected.
CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Progress:
    """One prompt's output so far, and the prompt's index in the HTTP request."""

    prompt_index: int
    output: RequestOutput


def answer_id(request_id: str, given: str | None) -> str:
    """The id that an answer shows: what the client gave, or the unique id in the engine.

    Args:
        request_id: in the engine, with a prefix.
        given: shown behind the prefix; clients may give one twice.
    """
    return request_id if given is None else f"{request_id.partition('-')[0]}-{given}"


class Generation(AsyncIterator[Progress]):
    """The prompts of one HTTP request in the engine: an iterator over their outputs, as they come.

    Args:
        streams: streams of the prompts, in order.
        times: observes every output.

    Raises:
        NumericalError, EngineDeadError: when read, a completion failed, which ends all of them.
        ApiError: when read, a completion was aborted by the server.
    """

    def __init__(self, streams: Sequence[RequestStream], times: RequestTimes) -> None:
        self._streams = streams
        self._times = times
        self._changed = asyncio.Event()
        self._share(at_end=False)
        # Those that were not looked at since something changed.
        self._unread = enumerate(streams)
        self._read_at = [time.monotonic()] * len(streams)
        self.latest: list[RequestOutput | None] = [None] * len(streams)

    def _share(self, *, at_end: bool) -> None:
        """Be woken whenever a prompt has more to read, or at the end of each."""
        for stream in self._streams:
            stream.share(self._changed, at_end=at_end)

    async def __anext__(self) -> Progress:
        while True:
            for index, stream in self._unread:
                if (output := stream.take()) is not None:
                    self._take(index, output)
                    return Progress(index, output)
            if all(stream.is_read for stream in self._streams):
                raise StopAsyncIteration
            await self._changed.wait()
            self._changed.clear()
            self._unread = enumerate(self._streams)

    async def __aenter__(self) -> Self:
        """Enter a block that aborts unfinished requests at its end."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abort unfinished requests."""
        for stream in self._streams:
            await stream.aclose()

    async def finish(self) -> list[RequestOutput]:
        """The finished outputs, one per prompt; errors as when they are read one by one."""
        self._share(at_end=True)
        async for _ in self:
            pass
        return self.outputs

    @property
    def outputs(self) -> list[RequestOutput]:
        """The newest outputs of all prompts that have one."""
        return [output for output in self.latest if output is not None]

    def _take(self, index: int, output: RequestOutput) -> None:
        now = time.monotonic()
        self._times.observe(self.latest[index], output, now - self._read_at[index])
        self._read_at[index] = now
        self.latest[index] = output
        for completion in output.outputs:
            _raise_failure(completion)


def _raise_failure(completion: CompletionOutput) -> None:
    if completion.error is not None:
        raise completion.error
    if completion.finish_reason in ("abort", "error"):
        raise ApiError(503, "the request was aborted. Send it again", code="aborted")


def usage(outputs: Sequence[RequestOutput]) -> Usage:
    """Token counts of prompts and completions."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(one.num_tokens for output in outputs for one in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


class UsageInStream:
    """The token counts in the events of a stream.

    Args:
        options: the request's, which say whether there are any.
    """

    def __init__(self, options: StreamOptions | None) -> None:
        self._at_end = options is not None and options.include_usage
        self._throughout = options is not None and options.continuous_usage_stats

    def every(
        self, output: RequestOutput, *completions: CompletionOutput
    ) -> dict[str, Usage | None]:
        """The field of an event with choices, if it has one.

        It is null, or the counts of the prompt and of the completions that the event is of.
        """
        if not self._at_end:
            return {}
        if not self._throughout:
            return {"usage": None}
        return {"usage": usage([replace(output, outputs=completions)])}

    def last(self, outputs: Iterable[RequestOutput]) -> dict[str, Usage]:
        """The field of the last event, if it has one."""
        return {"usage": usage(list(outputs))} if self._at_end else {}


def speculation_stats(
    outputs: Sequence[RequestOutput], requested: Literal[True, "detailed"]
) -> SpeculationStats:
    """Speculation counters over all outputs; "detailed" adds the steps of the one completion."""
    counters = sum((output.metrics.speculation for output in outputs), SpeculationMetrics())
    stats = SpeculationStats(
        num_steps=counters.num_steps,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        acceptance_length=counters.acceptance_length,
        acceptance_rate=counters.acceptance_rate,
        acceptance_per_position=list(counters.acceptance_per_position),
        offered_per_position=list(counters.offered_per_position),
    )
    if requested == DETAILED:
        windows = outputs[0].outputs[0].windows
        stats.per_step_drafted = [num_drafts for num_drafts, _ in windows]
        stats.per_step_accepted = [num_accepted for _, num_accepted in windows]
    return stats


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of ``work``; if the client disconnects, cancel the work and return None."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Framing:
    """The bytes of a stream's events: those of completions, which have no names.

    Attributes:
        end: what follows the last event.
    """

    end = b"data: [DONE]\n\n"

    def event(self, event: BaseModel) -> bytes:
        """One event."""
        return b"data: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        """The event of an error, which is the last."""
        return b"data: " + json.dumps(error.body).encode() + b"\n\n"


_CHUNKS = Framing()


def named_event(name: str, event: BaseModel) -> bytes:
    """An event with a name."""
    data = event.model_dump_json(exclude_unset=True).encode()
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(Response):
    """Sends each object as one event; an error is sent as an event too.

    Args:
        generation: the source of the events; closed after the last one or at a disconnect.
        events: the objects to send.
        framing: their form.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        events: AsyncGenerator[BaseModel, None],
        framing: Framing = _CHUNKS,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length is unknown.
        del self.headers["content-length"]
        self._generation, self._events, self._framing = generation, events, framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        async with self._generation:
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    await _send_part(send, self._framing.event(event))
                    # Other clients are served between the events of many completions.
                    await asyncio.sleep(0)
            except Exception as error:
                await _send_part(send, self._framing.error(as_api_error(error)))
        await send({"type": "http.response.body", "body": self._framing.end, "more_body": False})


class Answer(Protocol):
    """Makes one endpoint's response from a generation's outputs."""

    def whole(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """The response without a stream."""
        ...

    def stream(self, generation: Generation) -> AsyncGenerator[BaseModel, None]:
        """The response in chunks."""
        ...


async def respond(
    http: Request,
    generation: Generation,
    answer: Answer,
    *,
    stream: bool,
    framing: Framing = _CHUNKS,
) -> Response:
    """Stream the response, or send it whole once the generation has finished.

    Raises:
        ApiError, SametokenError: the generation failed before anything was sent.
    """
    if stream:
        return EventStream(generation, answer.stream(generation), framing)
    async with generation:
        outputs = await while_connected(http.receive, generation.finish())
    if outputs is None:
        return Response(status_code=CLIENT_GONE)
    return await asyncio.to_thread(lambda: json_response(answer.whole(outputs)))


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})

"""``/v1/responses``: answers as items, whole or in named events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from sametoken.errors import RequestError
from sametoken.serving.http.chat import begin_chat, count_chat
from sametoken.serving.http.errors import ApiError
from sametoken.serving.http.generation import (
    Framing,
    Generation,
    named_event,
    respond,
    speculation_stats,
)
from sametoken.serving.http.params import named_as_sent
from sametoken.serving.http.parsed import Parser
from sametoken.serving.http.response_schemas import TokenLogprob
from sametoken.serving.http.responses_api.conversation import chat_request
from sametoken.serving.http.responses_api.items import Events, ItemWriter, event
from sametoken.serving.http.responses_api.objects import (
    IncompleteDetails,
    InputTokens,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ReasoningItem,
    ResponseEvent,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
)
from sametoken.serving.http.responses_api.request import ResponsesRequest
from sametoken.serving.http.responses_api.tools import called_names, without_others
from sametoken.serving.http.served import Served
from sametoken.types.outputs import CompletionOutput, RequestOutput

#: Fields of a chat request, and of the engine, by the names that clients of responses send.
_SENT_AS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "prompt_token_ids": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}


async def answer_response(served: Served, request: ResponsesRequest, http: Request) -> Response:
    """Answer a request for a response.

    Raises:
        ApiError, SametokenError: the request cannot be served.
    """
    request.check_fields(num_prompts=1)
    model, key = served.name(request.model), uuid.uuid4().hex
    with _renamed():
        chat = await asyncio.to_thread(chat_request, request)
        with named_as_sent(chat):
            use, generation = await begin_chat(served, chat, f"resp_{key}", model)
    answer = _Answer(request, use.parser, key, model, served)
    return await respond(
        http, generation, answer, stream=bool(request.stream), framing=_Named(answer)
    )


async def count_input(served: Served, request: ResponsesRequest) -> InputTokens:
    """Count the tokens of a response's input, as its answer would.

    Raises:
        ApiError, SametokenError: the request cannot be served.
    """
    request.check_fields(num_prompts=1)
    served.name(request.model)
    with _renamed():
        chat = await asyncio.to_thread(chat_request, request)
        return InputTokens(input_tokens=await count_chat(served, chat))


@contextmanager
def _renamed() -> Iterator[None]:
    """Errors name the fields that clients of responses send."""
    try:
        yield
    except (ApiError, RequestError) as error:
        error.param = _SENT_AS.get(error.param or "", error.param)
        raise


@dataclass(frozen=True, slots=True)
class _Answer:
    """Makes the response to one request from the engine's outputs."""

    request: ResponsesRequest
    parser: Parser
    key: str
    model: str
    served: Served
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, outputs: Sequence[RequestOutput]) -> ResponseObject:
        """The response without a stream."""
        (output,) = outputs
        (completion,) = output.outputs
        writer = self._writer()
        for _ in self._finish(writer, completion):
            pass
        return self._done(output, writer.items)

    async def stream(self, generation: Generation) -> AsyncGenerator[BaseModel, None]:
        """The response in events: of the response, of its items, and of their parts."""
        writer, begun = self._writer(), False
        num_tokens = num_characters = 0
        async for one in generation:
            if not begun:
                response = self._response()
                for name in ("created", "in_progress"):
                    yield event(name, response=response)
                begun = True
            (completion,) = one.output.outputs
            if completion.finish_reason is None:
                for step in self._steps(completion, num_tokens, num_characters):
                    for each in writer.write(*step):
                        yield each
                num_tokens = completion.num_tokens
                num_characters = completion.num_characters
        (output,) = generation.outputs
        (completion,) = output.outputs
        for each in self._finish(writer, completion, num_tokens, num_characters):
            yield each
        done = await asyncio.to_thread(self._done, output, writer.items)
        yield event(done.status, response=done)

    def failed(self, message: str) -> ResponseObject:
        """The response that an error ended."""
        response = self._response()
        response.status, response.error = "failed", ResponseFault(message=message)
        return response

    def _writer(self) -> ItemWriter:
        names = called_names(self.request.tools or ())
        logprobs = self.request.wants_logprobs
        return ItemWriter(self.parser, self.key, names, with_logprobs=logprobs)

    def _finish(
        self,
        writer: ItemWriter,
        completion: CompletionOutput,
        num_tokens: int = 0,
        num_characters: int = 0,
    ) -> Events:
        """The last events, given the size of what was written."""
        *steps, last = self._steps(completion, num_tokens, num_characters)
        for step in steps:
            yield from writer.write(*step)
        yield from writer.finish(*last, is_cut=_is_cut(completion))

    def _steps(
        self, completion: CompletionOutput, num_tokens: int, num_characters: int
    ) -> list[tuple[str, list[TokenLogprob]]]:
        """What follows the first tokens and characters: at least one text and its tokens.

        With log-probabilities it is parted by tokens, so that these belong to the same items
        whatever the steps of the engine were.
        """
        logprobs = self._logprobs(completion, num_tokens)
        if not logprobs:
            return [(completion.text_from(num_characters), [])]
        pieces = completion.pieces_from(num_tokens, num_characters)
        if len(pieces) < len(logprobs):
            return [(pieces[0], logprobs)]
        return [(piece, [one]) for piece, one in zip(pieces, logprobs, strict=True)]

    def _logprobs(self, completion: CompletionOutput, start: int) -> list[TokenLogprob]:
        """Those of the tokens from ``start`` on, if they were asked for."""
        found = self.served.chat_logprobs(completion, start, self.request.top_logprobs)
        return [] if found is None else found.content

    def _done(self, output: RequestOutput, items: list[OutputItem]) -> ResponseObject:
        """The response at its end."""
        is_cut = _is_cut(output.outputs[0])
        response = self._response()
        response.status = "incomplete" if is_cut else "completed"
        response.output = items
        response.usage = self._usage(output, items)
        if is_cut:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        if wanted := self.request.include_speculation_stats:
            response.speculation = speculation_stats([output], wanted)
        return response

    def _usage(self, output: RequestOutput, items: list[OutputItem]) -> ResponseUsage:
        encode = self.served.engine.get_tokenizer().encode
        reasoning = [
            part.text for item in items if isinstance(item, ReasoningItem) for part in item.content
        ]
        num_reasoning = sum(len(encode(text, add_special_tokens=False)) for text in reasoning)
        num_input, num_output = len(output.prompt_token_ids), output.outputs[0].num_tokens
        return ResponseUsage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(cached_tokens=output.metrics.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning),
            total_tokens=num_input + num_output,
        )

    def _response(self) -> ResponseObject:
        """The response in progress."""
        request, defaults = self.request, self.served.defaults.params
        choice = request.tool_choice or "auto"
        temperature, top_p = request.temperature, request.top_p
        return ResponseObject(
            id=request.request_id or f"resp_{self.key}",
            created_at=self.created,
            status="in_progress",
            model=self.model,
            output=[],
            usage=None,
            error=None,
            incomplete_details=None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning=_sent(request.reasoning) or {"effort": None, "summary": None},
            temperature=defaults.temperature if temperature is None else temperature,
            text={"format": {"type": "text"}, **_sent(request.text)},
            tool_choice=choice if isinstance(choice, str) else _sent(choice),
            tools=[_sent(tool) for tool in without_others(request.tools or ())],
            top_logprobs=request.top_logprobs or 0,
            top_p=defaults.top_p if top_p is None else top_p,
        )


class _Named(Framing):
    """Of events with names and numbers.

    Args:
        answer: makes the response that an error ends.
    """

    end = b""

    def __init__(self, answer: _Answer) -> None:
        self._answer, self._numbers = answer, count()

    def event(self, event: BaseModel) -> bytes:
        """One event."""
        assert isinstance(event, ResponseEvent)
        event.sequence_number = next(self._numbers)
        return named_event(event.type, event)

    def error(self, error: ApiError) -> bytes:
        """The event of an error, and that of the response, which Codex and others wait for."""
        fields = error.body["error"]
        told = {name: fields[name] for name in ("code", "message", "param")}
        failed = event("failed", response=self._answer.failed(fields["message"]))
        return self.event(ResponseEvent(type="error", **told)) + self.event(failed)


def _is_cut(completion: CompletionOutput) -> bool:
    return completion.finish_reason == "length"


def _sent(model: BaseModel | None) -> dict[str, Any]:
    """What a client has sent, under the names that it used."""
    return {} if model is None else model.model_dump(by_alias=True, exclude_unset=True)

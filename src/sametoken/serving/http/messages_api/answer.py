"""``/v1/messages``: answers as content blocks, whole or in named events."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from sametoken.serving.http.chat import begin_chat, count_chat
from sametoken.serving.http.errors import ApiError
from sametoken.serving.http.generation import Framing, Generation, named_event, respond
from sametoken.serving.http.messages_api.blocks import BlockWriter
from sametoken.serving.http.messages_api.conversation import chat_request
from sametoken.serving.http.messages_api.objects import (
    ContentBlock,
    MessageEvent,
    MessageObject,
    MessageUsage,
    StopReason,
    TokenCount,
)
from sametoken.serving.http.messages_api.request import CountTokensRequest, MessagesRequest
from sametoken.serving.http.parsed import Parser
from sametoken.serving.http.served import Served
from sametoken.types.outputs import RequestOutput


async def answer_message(served: Served, request: MessagesRequest, http: Request) -> Response:
    """Answer a request for a message.

    Raises:
        ApiError, SametokenError: the request cannot be served.
    """
    request.check_fields(num_prompts=1)
    model, key = served.name(request.model), uuid.uuid4().hex
    chat = await asyncio.to_thread(chat_request, request, request.max_tokens)
    if chat.thinking_token_budget is None and served.bounds_reasoning:
        chat.thinking_token_budget = request.thinking_budget
    use, generation = await begin_chat(served, chat, f"msg_{key}", model)
    answer = _Answer(use.parser, key, model, served.engine.resolved.max_model_len)
    return await respond(
        http, generation, answer, stream=bool(request.stream), framing=MessageFraming()
    )


async def count_tokens(served: Served, request: CountTokensRequest) -> TokenCount:
    """Count the tokens of a conversation, as its answer would.

    Raises:
        ApiError, SametokenError: the request cannot be served.
    """
    request.check_fields(num_prompts=1)
    served.name(request.model)
    chat = await asyncio.to_thread(chat_request, request)
    return TokenCount(input_tokens=await count_chat(served, chat))


class MessageFraming(Framing):
    """Of events with names: clients pass over those without one."""

    end = b""

    def event(self, event: BaseModel) -> bytes:
        """One event."""
        assert isinstance(event, MessageEvent)
        return named_event(event.type, event)

    def error(self, error: ApiError) -> bytes:
        """The event of an error."""
        return b"event: error\ndata: " + json.dumps(error.messages_body).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class _Answer:
    """Makes the message of one request from the engine's outputs.

    Attributes:
        parser: of the answer.
        key: a unique part of its ids.
        model: its name.
        most_tokens: of the prompt and the answer.
    """

    parser: Parser
    key: str
    model: str
    most_tokens: int

    def whole(self, outputs: Sequence[RequestOutput]) -> MessageObject:
        """The message without a stream."""
        (output,) = outputs
        (completion,) = output.outputs
        writer = BlockWriter(self.parser, self.key)
        for _ in writer.finish(completion.text):
            pass
        return self._message(output, writer.content, self._stop(output, writer))

    async def stream(self, generation: Generation) -> AsyncGenerator[BaseModel, None]:
        """The message in events: of itself, and of its blocks."""
        writer, begun, num_characters = BlockWriter(self.parser, self.key), False, 0
        async for one in generation:
            if not begun:
                message = self._message(one.output, [], (None, None))
                yield MessageEvent(type="message_start", message=message)
                begun = True
            (completion,) = one.output.outputs
            if completion.finish_reason is None:
                for event in writer.write(completion.text_from(num_characters)):
                    yield event
                num_characters = completion.num_characters
        (output,) = generation.outputs
        (completion,) = output.outputs
        for event in writer.finish(completion.text_from(num_characters)):
            yield event
        reason, sequence = self._stop(output, writer)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield MessageEvent(type="message_delta", delta=delta, usage=_usage(output))
        yield MessageEvent(type="message_stop")

    def _message(
        self,
        output: RequestOutput,
        content: list[ContentBlock],
        stop: tuple[StopReason | None, str | None],
    ) -> MessageObject:
        reason, sequence = stop
        return MessageObject(
            id=f"msg_{self.key}",
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(output),
        )

    def _stop(
        self, output: RequestOutput, writer: BlockWriter
    ) -> tuple[StopReason | None, str | None]:
        """Why the answer ended, and the text that ended it."""
        (completion,) = output.outputs
        if completion.finish_reason == "length":
            num_tokens = len(output.prompt_token_ids) + completion.num_tokens
            is_full = num_tokens >= self.most_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        return ("tool_use" if writer.has_calls else "end_turn"), None


def _usage(output: RequestOutput) -> MessageUsage:
    cached = output.metrics.num_cached_tokens
    return MessageUsage(
        input_tokens=len(output.prompt_token_ids) - cached,
        cache_read_input_tokens=cached,
        output_tokens=output.outputs[0].num_tokens,
    )

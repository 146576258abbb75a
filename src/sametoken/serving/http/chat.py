"""``/v1/chat/completions``: conversations, rendered by the model's chat template."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from sametoken.engine.user_inputs import PromptTokens, content_text
from sametoken.serving.http.custom_inputs import with_inputs
from sametoken.serving.http.generation import (
    Generation,
    UsageInStream,
    answer_id,
    respond,
    speculation_stats,
    usage,
)
from sametoken.serving.http.logprobs import prompt_logprobs
from sametoken.serving.http.params import chat_params, structured_outputs
from sametoken.serving.http.parsed import (
    FoundCall,
    FoundText,
    GrowingAnswer,
    NewPart,
    with_one_call,
)
from sametoken.serving.http.reasoning_parsers import RenderedPrompt
from sametoken.serving.http.response_schemas import (
    CalledCustomTool,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    FinishReason,
    ToolCall,
    note_experts,
    note_versions,
)
from sametoken.serving.http.schemas import ChatRequest
from sametoken.serving.http.served import Served
from sametoken.serving.http.tool_schemas import CustomTool
from sametoken.serving.http.tools import ToolUse, template_tools, tool_use, with_allowed
from sametoken.types.outputs import CompletionOutput, RequestOutput
from sametoken.types.sampling_params import SamplingParams

Kind = TypeVar("Kind", ChatResponse, ChatChunk)


async def answer_chat(served: Served, request: ChatRequest, http: Request) -> Response:
    """Answer a chat request.

    Raises:
        ApiError, SametokenError: the request cannot be served.
    """
    request.check_fields(num_prompts=1)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    model = served.name(request.model)
    use, generation = await begin_chat(served, request, request_id, model)
    answer = _Answer(request, use, request_id, model, served)
    return await respond(http, generation, answer, stream=bool(request.stream))


async def begin_chat(
    served: Served, request: ChatRequest, request_id: str, model: str
) -> tuple[ToolUse, Generation]:
    """Begin the answer to a conversation whose fields are checked, by what has a served name.

    Raises:
        ApiError, SametokenError: the request cannot be served.
    """
    request = with_allowed(request)
    use, params = await asyncio.to_thread(_tools_and_params, served, request)
    served.check(1, params)
    most = served.num_kept(request.truncate_prompt_tokens, params)
    prompt = await _prompt(served, request, use.tools)
    prompt = await asyncio.to_thread(served.last, prompt, most)
    continued = content_text(request.messages[-1].content) if request.continue_final_message else ""
    rendered = RenderedPrompt(prompt.text or "", continued, prompt.token_ids)
    params, parser = served.reasons(params, rendered, use)
    if use.custom:
        parser = with_inputs(parser, use.custom)
    if request.parallel_tool_calls is False:
        parser = with_one_call(parser)
    return replace(use, parser=parser), await served.begin([prompt], params, request_id, model)


async def count_chat(served: Served, request: ChatRequest) -> int:
    """The tokens of a conversation, as its answer would have them.

    Raises:
        ApiError, RequestError: see ``Served.render``.
    """
    request = with_allowed(request)
    tools = template_tools(request.tools) if request.tools else None
    prompt = await _prompt(served, request, tools)
    return len(prompt.token_ids)


async def _prompt(
    served: Served, request: ChatRequest, tools: list[dict[str, Any]] | None
) -> PromptTokens:
    """The prompt of a conversation.

    Args:
        served: has the template.
        request: the conversation.
        tools: its tools in the format of chat templates.

    Raises:
        ApiError, RequestError: see ``Served.render``.
    """
    return await served.render(
        request.messages,
        request.template_variables,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        tools=tools,
    )


def _tools_and_params(served: Served, request: ChatRequest) -> tuple[ToolUse, SamplingParams]:
    syntax = served.call_syntax(request.tools) if request.tools and request.may_call else None
    use = tool_use(request, structured_outputs(request), syntax)
    params = chat_params(request, served.defaults, use.structured)
    if syntax is not None:
        params = served.with_calls(params)
    custom = frozenset(
        tool.function.name for tool in request.tools or () if isinstance(tool, CustomTool)
    )
    return replace(use, custom=custom), params


@dataclass(frozen=True, slots=True)
class _Answer:
    """Makes the response to one request from the engine's outputs."""

    request: ChatRequest
    use: ToolUse
    request_id: str
    model: str
    served: Served
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatResponse:
        """The response without a stream."""
        (output,) = outputs
        more = self._stats(output) | self._of_prompt(output)
        choices = [self._choice(completion) for completion in output.outputs]
        self._note_versions(choices, output)
        return self._make(ChatResponse, choices, usage=usage([output]), **more)

    async def stream(self, generation: Generation) -> AsyncGenerator[BaseModel, None]:
        """The response in chunks: each output's new part of each completion."""
        told = UsageInStream(self.request.stream_options)
        writers = [_ChoiceWriter(self, index) for index in range(self.request.n)]
        begun = False
        async for one in generation:
            if not begun:
                # What was requested of the prompt comes with the first token.
                if not any(each.num_tokens for each in one.output.outputs):
                    continue
                first = [writer.begin() for writer in writers]
                read = partial(self._of_prompt, one.output)
                # The candidates of a prompt may be many.
                is_long = one.output.prompt_logprobs is not None
                of_prompt = await asyncio.to_thread(read) if is_long else read()
                yield self._make(ChatChunk, first, **told.every(one.output), **of_prompt)
                begun = True
            for completion in one.output.outputs:
                choices = writers[completion.index].write(completion)
                self._note_versions(choices, one.output)
                every = told.every(one.output, completion)
                for choice in choices:
                    yield self._make(ChatChunk, [choice], **every)
        (output,) = generation.outputs
        last = self._stats(output) | told.last([output])
        if last:
            yield self._make(ChatChunk, [], **last)

    def finish_reason(
        self, completion: CompletionOutput, *, has_calls: bool
    ) -> FinishReason | None:
        """The finish reason in OpenAI's words; None if the completion goes on."""
        if completion.finish_reason == "stop" and has_calls and self.use.reports_calls:
            return "tool_calls"
        return completion.finish_reason  # type: ignore[return-value]

    def call(self, found: FoundCall, choice_index: int, call_index: int) -> ToolCall:
        """A tool call, whose id is globally unique."""
        call_id = f"call_{self.request_id.removeprefix('chatcmpl-')}_{choice_index}_{call_index}"
        if found.name in self.use.custom:
            called = CalledCustomTool(name=found.name, input=found.arguments)
            return ToolCall(id=call_id, type="custom", custom=called)
        function = CalledFunction(name=found.name, arguments=found.arguments)
        return ToolCall(id=call_id, type="function", function=function)

    def logprobs(self, completion: CompletionOutput, start: int) -> ChatLogprobs | None:
        """Log-probabilities of the tokens from ``start`` on, if they were requested."""
        as_ids = bool(self.request.return_tokens_as_token_ids)
        top = self.request.top_logprobs
        return self.served.chat_logprobs(completion, start, top, as_ids=as_ids)

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        parsed = self.use.parser(completion.text, True)
        is_empty = not parsed.content and (parsed.calls or parsed.reasoning)
        message = ChatMessage(role="assistant", content=None if is_empty else parsed.content)
        message.refusal = None
        _, reasoning = self.served.parsers
        if reasoning is not None:
            message.reasoning = (self.request.include_reasoning and parsed.reasoning) or None
        if parsed.calls:
            message.tool_calls = [
                self.call(found, completion.index, position)
                for position, found in enumerate(parsed.calls)
            ]
        choice = ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self.logprobs(completion, 0),
            finish_reason=self.finish_reason(  # type: ignore[arg-type]
                completion, has_calls=bool(parsed.calls)
            ),
            stop_reason=completion.stop_reason,
        )
        if self.request.return_token_ids:
            choice.token_ids = list(completion.token_ids)
        note_experts(choice, completion)
        return choice

    def _note_versions(
        self, choices: Sequence[ChatChoice | ChatChunkChoice], output: RequestOutput
    ) -> None:
        for choice in choices:
            if self.served.shows_versions:
                note_versions(choice, output)

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What was requested of the prompt, for the answer or a stream's first event."""
        found: dict[str, Any] = {}
        if self.request.return_token_ids:
            found["prompt_token_ids"] = list(output.prompt_token_ids)
        if self.request.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return found

    def _stats(self, output: RequestOutput) -> dict[str, Any]:
        wanted = self.request.include_speculation_stats
        return {"speculation": speculation_stats([output], wanted)} if wanted else {}

    def _make(self, kind: type[Kind], choices: list[Any], **more: Any) -> Kind:
        made = kind(
            id=answer_id(self.request_id, self.request.request_id),
            created=self.created,
            model=self.model,
            choices=choices,
            **more,
        )
        # Set explicitly, since only fields that were set are sent.
        made.object = made.object
        return made


class _ChoiceWriter:
    """Writes one choice of a stream in chunks."""

    def __init__(self, answer: _Answer, index: int) -> None:
        self._answer = answer
        self._index = index
        self._text = GrowingAnswer(answer.use.parser)
        self._num_calls = self._num_characters = 0
        #: Of the newest call.
        self._is_custom = False
        self._num_tokens = 0
        self._finished = False

    def begin(self) -> ChatChunkChoice:
        """The first chunk, with the role."""
        return self._piece(ChatMessage(role="assistant", content=""))

    def write(self, completion: CompletionOutput) -> list[ChatChunkChoice]:
        """The parts of the completion that were not sent yet."""
        if self._finished:
            return []
        self._finished = completion.finish_reason is not None
        piece = completion.text_from(self._num_characters)
        self._num_characters += len(piece)
        deltas = self._deltas(self._text.read(piece, finished=self._finished))
        has_tokens = completion.num_tokens > self._num_tokens
        sends_tokens = completion.has_logprobs or self._answer.request.return_token_ids
        if not deltas and has_tokens and sends_tokens:
            deltas = [ChatMessage()]
        pieces = [self._piece(delta) for delta in deltas]
        if pieces:
            self._add_tokens(pieces[0], completion)
        if self._finished:
            last = self._piece(ChatMessage())
            last.finish_reason = self._answer.finish_reason(
                completion, has_calls=self._num_calls > 0
            )
            last.stop_reason = completion.stop_reason
            note_experts(last, completion)
            pieces.append(last)
        return pieces

    def _deltas(self, parts: list[NewPart]) -> list[ChatMessage]:
        deltas = []
        for part in parts:
            if isinstance(part, FoundCall):
                call = self._answer.call(part, self._index, self._num_calls)
                call.index = self._num_calls
                self._num_calls += 1
                self._is_custom = call.custom is not None
                deltas.append(ChatMessage(tool_calls=[call]))
            elif not isinstance(part, FoundText):
                deltas.append(ChatMessage(tool_calls=[self._more(part.text)]))
            elif part.kind == "content":
                deltas.append(ChatMessage(content=part.text))
            elif self._answer.request.include_reasoning:
                deltas.append(ChatMessage(reasoning=part.text))
        return deltas

    def _more(self, text: str) -> ToolCall:
        """What the newest call has grown by."""
        index = self._num_calls - 1
        if self._is_custom:
            return ToolCall(index=index, custom=CalledCustomTool(input=text))
        return ToolCall(index=index, function=CalledFunction(arguments=text))

    def _add_tokens(self, piece: ChatChunkChoice, completion: CompletionOutput) -> None:
        piece.logprobs = self._answer.logprobs(completion, self._num_tokens)
        if self._answer.request.return_token_ids:
            piece.token_ids = list(completion.token_ids_from(self._num_tokens))
        self._num_tokens = completion.num_tokens

    def _piece(self, delta: ChatMessage) -> ChatChunkChoice:
        return ChatChunkChoice(index=self._index, delta=delta, logprobs=None, finish_reason=None)

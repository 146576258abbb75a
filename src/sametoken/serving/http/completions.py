"""``/v1/completions``: prompts are continued without a chat template."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from sametoken.engine.user_inputs import PromptTokens
from sametoken.serving.http.errors import invalid
from sametoken.serving.http.generation import (
    Generation,
    UsageInStream,
    answer_id,
    respond,
    speculation_stats,
    usage,
)
from sametoken.serving.http.logprobs import (
    LogprobsForm,
    completion_logprobs,
    positions,
    prompt_logprobs,
)
from sametoken.serving.http.params import completion_params, structured_outputs
from sametoken.serving.http.response_schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    note_experts,
    note_versions,
)
from sametoken.serving.http.schemas import CompletionRequest
from sametoken.serving.http.served import Served
from sametoken.text.detokenizer import make_detokenizer
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.outputs import CompletionOutput, RequestOutput
from sametoken.types.sampling_params import SamplingParams

#: Candidates of prompts in an answer, which has those of a prompt in each of its completions. One
#: takes 500 bytes.
_MAX_CANDIDATES = 2**22


async def complete(served: Served, request: CompletionRequest, http: Request) -> Response:
    """Answer a completion request.

    Raises:
        ApiError, SametokenError: the request cannot be served.
    """
    given = _prompts(request)
    request.check_fields(len(given))
    model = served.name(request.model)
    params = await asyncio.to_thread(
        lambda: completion_params(request, served.defaults, structured_outputs(request))
    )
    served.check(len(given), params)
    most = served.num_kept(request.truncate_prompt_tokens, params)
    prompts = [
        await served.tokenize(prompt, most, add_special_tokens=request.add_special_tokens)
        for prompt in given
    ]
    _require_few_candidates(prompts, params)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    shown = [_Prompt(prompt.token_ids) for prompt in prompts]
    if request.echo:
        echo = partial(_Prompt.echoed, tokenizer=served.engine.get_tokenizer())
        shown = await asyncio.to_thread(lambda: list(map(echo, prompts)))
    answer = _Answer(served, request, shown, answer_id(request_id, request.request_id), model)
    generation = await served.begin(prompts, params, request_id, model)
    return await respond(http, generation, answer, stream=bool(request.stream))


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request; a list of token ids is one prompt."""
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given) or [[]]


def _require_few_candidates(prompts: Sequence[PromptTokens], params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        return
    num_tokens = params.n * sum(len(prompt.token_ids) for prompt in prompts)
    num_candidates = num_tokens * (params.prompt_logprobs + 1)
    if num_candidates > _MAX_CANDIDATES:
        raise invalid(
            f"the answer would have {num_candidates} candidates of the prompts' tokens and at most "
            f"{_MAX_CANDIDATES} are allowed. Send several requests, or ask for fewer "
            "log-probabilities",
            "prompt_logprobs",
        )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as its completions show it.

    Attributes:
        token_ids: its tokens.
        echo: its text, if completions begin with it.
        offsets: where each token begins in the text; one that the tokenizer adds, at 0.
    """

    token_ids: Sequence[int]
    echo: str = ""
    offsets: Sequence[int] = ()

    @classmethod
    def echoed(cls, prompt: PromptTokens, tokenizer: Tokenizer) -> _Prompt:
        """A prompt that completions begin with."""
        ids, text = prompt.token_ids, prompt.text
        if text is None:
            text = tokenizer.decode(ids, skip_special_tokens=False)
        detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
        begins, size = [], 0
        for token_id in ids:
            piece = detokenizer.append(token_id)
            begins.append(size + detokenizer.num_before)
            size += len(piece)
        num_added = max(size + len(detokenizer.finish()) - len(text), 0)
        return cls(ids, text, [max(begin - num_added, 0) for begin in begins])


@dataclass(frozen=True, slots=True)
class _Answer:
    """Makes the response to one request from the engine's outputs."""

    served: Served
    request: CompletionRequest
    prompts: Sequence[_Prompt]
    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        """The response without a stream."""
        writers = self._writers()
        shown = [self._shown(output) for output in outputs]
        choices = [
            writers[prompt_index][completion.index].write(output, completion)
            for prompt_index, output in enumerate(shown)
            for completion in output.outputs
        ]
        return self._response(choices, usage=usage(shown), **self._stats(outputs))

    async def stream(self, generation: Generation) -> AsyncGenerator[BaseModel, None]:
        """The response in chunks: each output's new part of each completion."""
        told = UsageInStream(self.request.stream_options)
        writers = self._writers()
        async for one in generation:
            output = self._shown(one.output)
            for completion in output.outputs:
                writer = writers[one.prompt_index][completion.index]
                if writer.has_new_output(completion):
                    write = partial(writer.write, output, completion)
                    # The candidates of a prompt may be many.
                    is_long = output.prompt_logprobs is not None and not writer.begun
                    choice = await asyncio.to_thread(write) if is_long else write()
                    yield self._response([choice], **told.every(output, completion))
        last = self._stats(generation.outputs)
        last |= told.last(map(self._shown, generation.outputs))
        if last:
            yield self._response([], **last)

    def _writers(self) -> list[list[_ChoiceWriter]]:
        """A writer for each prompt and completion."""
        n = self.request.n
        return [
            [_ChoiceWriter(self, prompt, prompt_index * n + i) for i in range(n)]
            for prompt_index, prompt in enumerate(self.prompts)
        ]

    def _response(self, choices: list[CompletionChoice], **more: Any) -> CompletionResponse:
        return CompletionResponse(
            id=self.request_id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            **more,
        )

    def _stats(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        wanted = self.request.include_speculation_stats
        return {"speculation": speculation_stats(outputs, wanted)} if wanted else {}

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """The output; with ``max_tokens=0`` without the token that the engine made."""
        if self.request.max_tokens != 0:
            return output
        return replace(output, outputs=tuple(map(_without_token, output.outputs)))


def _without_token(completion: CompletionOutput) -> CompletionOutput:
    """A completion as it would be without its only token, which may have been a stop."""
    return replace(
        completion,
        text="",
        token_ids=(),
        logprobs=None if completion.logprobs is None else (),
        finish_reason=completion.finish_reason and "length",
        stop_reason=None,
    )


class _ChoiceWriter:
    """Writes one completion, in one piece or in several that add up to it.

    Attributes:
        begun: whether a part was written.
    """

    def __init__(self, answer: _Answer, prompt: _Prompt, index: int) -> None:
        self._served, self._request = answer.served, answer.request
        self._prompt = prompt
        self._index = index
        self.begun = False
        self._finished = False
        self._num_characters = 0
        self._num_tokens = 0

    def has_new_output(self, completion: CompletionOutput) -> bool:
        """Whether the completion has parts that were not sent."""
        return not self._finished and (
            completion.finish_reason is not None
            or completion.num_tokens > self._num_tokens
            or completion.num_characters > self._num_characters
        )

    def write(self, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """The part of the completion that was not sent yet."""
        new_text = completion.text_from(self._num_characters)
        echoed = "" if self.begun else self._prompt.echo
        choice = CompletionChoice(
            index=self._index,
            text=echoed + new_text,
            logprobs=self._logprobs(output, completion),
            finish_reason=completion.finish_reason,  # type: ignore[arg-type]
            stop_reason=completion.stop_reason,
        )
        if self._request.return_token_ids:
            choice.token_ids = list(completion.token_ids_from(self._num_tokens))
            if not self.begun:
                choice.prompt_token_ids = list(self._prompt.token_ids)
        if self._request.prompt_logprobs is not None and not self.begun:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self._served.shows_versions:
            note_versions(choice, output)
        note_experts(choice, completion)
        self.begun = True
        self._finished = completion.finish_reason is not None
        self._num_characters = completion.num_characters
        self._num_tokens = completion.num_tokens
        return choice

    def _logprobs(
        self, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionLogprobs | None:
        logprobs = completion.logprobs_from(self._num_tokens)
        if logprobs is None:
            return None
        found = positions(completion.token_ids_from(self._num_tokens), logprobs)
        starts = completion.starts_from(self._num_tokens)
        offsets = [len(self._prompt.echo) + start for start in starts]
        if self._request.echo and not self.begun:
            first = self._served.engine.get_tokenizer().decode_token(self._prompt.token_ids[0])
            of_prompt = positions(self._prompt.token_ids, output.prompt_logprobs or (), first)
            found = of_prompt + found
            offsets = [*self._prompt.offsets, *offsets]
        form = LogprobsForm(
            self._request.logprobs or 0, bool(self._request.return_tokens_as_token_ids)
        )
        return completion_logprobs(found, form, offsets)

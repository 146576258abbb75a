"""The served model behind all endpoints: its names, checks, tokenization and chat templates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sametoken.engine.sampling_defaults import ServerDefaults
from sametoken.engine.user_inputs import NO_VARIABLES, PromptTokens
from sametoken.errors import RequestError, shown
from sametoken.serving.http.config import OPENAI, ServerConfig
from sametoken.serving.http.errors import ApiError, invalid
from sametoken.serving.http.generation import Generation
from sametoken.serving.http.logprobs import LogprobsForm, chat_logprobs, positions
from sametoken.serving.http.parsed import Parser
from sametoken.serving.http.reasoning_parsers import (
    REASONING_FORMS,
    ComingAnswer,
    RenderedPrompt,
    showing,
    with_marks,
)
from sametoken.serving.http.response_schemas import ChatLogprobs, ModelCard
from sametoken.serving.http.schemas import Message
from sametoken.serving.http.times import RequestTimes
from sametoken.serving.http.tool_parsers import (
    CALL_MARKS,
    FIRST_MARKS,
    TOOL_PARSERS,
    CallSyntax,
    parser_of_template,
)
from sametoken.serving.http.tool_schemas import Tool
from sametoken.serving.http.tools import ToolUse, template_messages
from sametoken.text.reasoning_marks import ReasoningMarks, no_marks
from sametoken.types.lora_modules import LoRAModule
from sametoken.types.outputs import CompletionOutput
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import Reasoning, StructuredOutputs

if TYPE_CHECKING:
    from sametoken.serving.async_llm import AsyncLLM
    from sametoken.serving.request_stream import RequestStream

#: Template options that clients may not set: the server sets them, or they replace the template,
#: itself or within ``chat_template_kwargs``.
_RESERVED = NO_VARIABLES | {
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "return_dict",
    "return_tensors",
    "tools",
}


@dataclass(frozen=True, slots=True)
class Served:
    """One engine behind the API.

    Attributes:
        engine: the engine.
        config: options of the server.
        times: histograms of requests.
        defaults: what holds for requests that leave it out.
        created: Unix time of the server's start.
    """

    engine: AsyncLLM
    config: ServerConfig
    times: RequestTimes
    defaults: ServerDefaults
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def shows_versions(self) -> bool:
        """Whether answers have the versions of the weights, as these may change."""
        return self.config.weight_transfer_config is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model itself; responses have the first by default."""
        return self.config.names(self.engine.resolved.model)

    def name(self, requested: str | None) -> str:
        """The name in the response to a request, of the model or of an adapter.

        Raises:
            ApiError: none of them has the requested name.
        """
        if requested is None:
            return self.names[0]
        require_served(requested, self.names, self.engine.adapters.modules)
        return requested

    def cards(self) -> list[ModelCard]:
        """The model under each of its names, then the adapters."""
        made = partial(
            ModelCard, created=self.created, max_model_len=self.engine.resolved.max_model_len
        )
        first = self.names[0]
        return [
            *(made(id=name, root=first) for name in self.names),
            *(
                made(id=one.name, root=one.path or one.name, parent=first)
                for one in self.engine.adapters.modules
            ),
        ]

    def check(self, num_prompts: int, params: SamplingParams) -> None:
        """Check a request's counts before its prompts are tokenized.

        Raises:
            ApiError: there are too many completions, or more drafts than there may be.
            RequestError: more log-probabilities are requested than there may be.
        """
        num_completions, most = num_prompts * params.n, self.config.max_completions
        if num_completions > most:
            raise invalid(
                f"the request is for {num_completions} completions and at most {most} are allowed. "
                "Send several requests",
                "n",
            )
        for name in ("logprobs", "prompt_logprobs"):
            num_logprobs, most = getattr(params, name) or 0, self.config.max_logprobs
            if num_logprobs > most:
                raise RequestError(
                    f"{num_logprobs} log-probabilities of a position are above the {most} of this "
                    "server",
                    f"use 0 to {most}",
                    param=name,
                )
        most_drafts = self.engine.resolved.num_speculative_tokens
        num_drafts = params.num_speculative_tokens
        if num_drafts is not None and num_drafts > most_drafts:
            raise invalid(
                f"num_speculative_tokens={num_drafts} is above the {most_drafts} of this server. "
                f"Use 0 to {most_drafts}",
                "speculative",
            )

    async def begin(
        self, prompts: Sequence[PromptTokens], params: SamplingParams, request_id: str, name: str
    ) -> Generation:
        """Begin all prompts of a request, or none.

        Args:
            prompts: token ids, at least one prompt.
            params: for all of them.
            request_id: unique; prompt i is ``request_id-i``.
            name: of the model or of an adapter, as ``name`` gives it.

        Raises:
            RequestError, OverloadedError, DrainingError, EngineDeadError: the engine refuses one.
        """
        adapter = None if name in self.names else name
        requests = await self.engine.prepare(prompts, params, request_id, adapter)
        streams: list[RequestStream] = []
        try:
            for request in requests:
                streams.append(self.engine.begin(request))
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return Generation(streams, self.times)

    def num_kept(self, asked: int | None, params: SamplingParams) -> int | None:
        """How many tokens are kept of each prompt; None: all, and one that is too long is refused.

        Args:
            asked: ``truncate_prompt_tokens``.
            params: of the request.

        Raises:
            ApiError: all that fit are asked for, and ``max_tokens`` leaves room for none.
        """
        if asked != -1:
            return asked
        most = self.engine.resolved.max_model_len - (params.max_tokens or 1)
        if most < 1:
            raise invalid(
                f"max_tokens={params.max_tokens} leaves no room for a prompt in the context. Lower "
                "it, or say how many tokens truncate_prompt_tokens keeps",
                "max_tokens",
            )
        return most

    def last(self, prompt: PromptTokens, most: int | None) -> PromptTokens:
        """The last ``most`` tokens of a prompt, or all."""
        num_cut = 0 if most is None else len(prompt.token_ids) - most
        if num_cut <= 0:
            return prompt
        ids = prompt.token_ids[num_cut:]
        return PromptTokens(self.engine.get_tokenizer().decode(ids, skip_special_tokens=False), ids)

    async def tokenize(
        self, prompt: str | list[int], most: int | None = None, *, add_special_tokens: bool = True
    ) -> PromptTokens:
        """A prompt's token ids, or the last ``most``, computed off the event loop.

        Raises:
            RequestError: it is a text that is too long, or there is no tokenizer for it.
        """
        if not isinstance(prompt, str):
            kept = prompt if most is None else prompt[max(len(prompt) - most, 0) :]
            return await asyncio.to_thread(self.engine.tokenize, {"prompt_token_ids": kept})

        def tokens() -> PromptTokens:
            found = self.engine.tokenize(prompt, add_special_tokens=add_special_tokens)
            return self.last(found, most)

        return await asyncio.to_thread(tokens)

    async def render(
        self, messages: Sequence[Message], given: dict[str, Any] | None, **options: Any
    ) -> PromptTokens:
        """The prompt of a conversation, rendered off the event loop.

        Args:
            messages: the client's messages.
            given: the client's variables for the template.
            options: the server's variables.

        Raises:
            ApiError: the client sets a reserved variable, or the options contradict each other.
            RequestError: a message is not text, or there is no chat template, or it refuses the
                messages.
        """
        for name in given or {}:
            if name in _RESERVED:
                raise invalid(
                    f"chat_template_kwargs may not set {name!r}. Leave it out",
                    "chat_template_kwargs",
                )
        if options.get("add_generation_prompt") and options.get("continue_final_message"):
            raise invalid(
                "add_generation_prompt and continue_final_message contradict each other. Set one",
                "continue_final_message",
            )
        every = {**(given or {}), **options}
        calls, _ = self.parsers

        def render() -> PromptTokens:
            return self.engine.render_chat(template_messages(messages, calls), **every)

        return await asyncio.to_thread(render)

    @property
    def parsers(self) -> tuple[str | None, str | None]:
        """The names of the parsers of tool calls and of reasoning, None for none."""
        template = self.engine.get_tokenizer().chat_template
        return self.config.parsers(parser_of_template(template))

    def call_syntax(self, tools: Sequence[Tool]) -> CallSyntax | None:
        """How the model writes calls of these tools, if that is known."""
        name, _ = self.parsers
        if name is None:
            return None
        functions = [tool.function for tool in tools]
        parser = TOOL_PARSERS[name]({one.name: one.parameters or {} for one in functions})
        mark = FIRST_MARKS.get(name)
        if mark is None:
            return CallSyntax(parser)
        tokenizer = self.engine.get_tokenizer()
        # No grammar has special tokens. Harmony's come before its text; others never could.
        is_special = tokenizer.backend.token_to_id(mark) in tokenizer.special_ids
        is_before = name == OPENAI and not self.config.constrains_reasoning
        possible = mark if is_special == is_before else None
        return CallSyntax(parser, possible, is_constrained=not is_before)

    def with_calls(self, params: SamplingParams) -> SamplingParams:
        """Parameters of an answer in which calls are looked for."""
        return showing(params, CALL_MARKS, self.engine.get_tokenizer())

    def reasons(
        self, params: SamplingParams, prompt: RenderedPrompt, use: ToolUse
    ) -> tuple[SamplingParams, Parser]:
        """Parameters and the parser of an answer that may reason before its content.

        Args:
            params: of a request; a constraint is of the content.
            prompt: of the request.
            use: the tools, and the parser of the content.
        """
        _, name = self.parsers
        content, structured = use.parser, params.structured_outputs
        if name is None or (structured is not None and self.config.constrains_reasoning):
            return params, content
        form, tokenizer = REASONING_FORMS[name], self.engine.get_tokenizer()
        before = None
        if structured is not None or params.thinking_token_budget is not None:
            before = form.before_content(
                prompt, partial(tokenizer.encode, add_special_tokens=False)
            )
        if structured is not None and before is None:
            return params, content
        answer = ComingAnswer(
            prompt,
            content,
            shows_marks=not params.skip_special_tokens,
            is_constrained=structured is not None and structured.free_after is None,
            functions=use.functions,
        )
        if before is not None:
            params = self._reasons_first(params, before, prompt)
        params = with_marks(params, form, tokenizer, self.engine.resolved.eos_token_ids)
        return params, form.parser(answer)

    def _reasons_first(
        self, params: SamplingParams, before: Reasoning, prompt: RenderedPrompt
    ) -> SamplingParams:
        """Parameters of an answer whose reasoning is known, with the budget that is asked for."""
        structured, budget = params.structured_outputs, params.thinking_token_budget
        if budget is not None:
            marks = self._marks(before.end)
            if marks is None:
                raise no_marks()
            before = marks.bounded(
                budget, prompt.token_ids, before, has_any_text=structured is None
            )
        structured = replace(structured or StructuredOutputs(reasoning=before), reasoning=before)
        return replace(params, structured_outputs=structured, thinking_token_budget=None)

    @property
    def bounds_reasoning(self) -> bool:
        """Whether reasoning can have a budget."""
        return self._marks() is not None

    def _marks(self, end: tuple[int, ...] | None = None) -> ReasoningMarks | None:
        tokenizer, ends = self.engine.get_tokenizer(), self.engine.resolved.eos_token_ids
        return ReasoningMarks.of(tokenizer, ends, end)

    def chat_logprobs(
        self, completion: CompletionOutput, start: int, num_top: int | None, *, as_ids: bool = False
    ) -> ChatLogprobs | None:
        """Log-probabilities of the tokens from ``start`` on; None if they were not requested.

        ``num_top`` and ``as_ids`` are as in ``LogprobsForm``.
        """
        logprobs = completion.logprobs_from(start)
        if logprobs is None:
            return None
        found = positions(completion.token_ids_from(start), logprobs)
        form = LogprobsForm(num_top or 0, as_ids, self.engine.get_tokenizer().token_bytes)
        return chat_logprobs(found, form)


def require_served(requested: str, names: Sequence[str], adapters: Sequence[LoRAModule]) -> None:
    """Refuse a request for another model.

    Raises:
        ApiError: the name is neither one of the model nor that of an adapter.
    """
    names = [*names, *(one.name for one in adapters)]
    if requested not in names:
        known = " or ".join(map(repr, names))
        raise ApiError(
            404,
            f"the model {shown(requested)} does not exist. Use {known}",
            param="model",
            code="model_not_found",
        )

"""What every endpoint works with: the engine under its names, and prompts made into tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sametoken.engine.input_processor import PromptTokens
from sametoken.errors import shown
from sametoken.serving.http.config import (
    AUTO,
    NONE,
    ServerConfig,
)
from sametoken.serving.http.errors import (
    ApiError,
    invalid,
)
from sametoken.serving.http.generation import Generation
from sametoken.serving.http.responses import ModelCard
from sametoken.serving.http.schemas import (
    Message,
    Tool,
)
from sametoken.serving.http.times import RequestTimes
from sametoken.serving.http.tool_parsers import (
    TOOL_PARSERS,
    ToolParser,
    parser_of_template,
)
from sametoken.serving.http.tools import template_messages
from sametoken.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sametoken.serving.async_llm import AsyncLLM

#: Options of the chat template that the server sets itself, or that would replace it.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tools",
    }
)


@dataclass(frozen=True, slots=True)
class Served:
    """One engine behind the API.

    Attributes:
        engine: takes the requests.
        config: options of the server.
        times: histograms of requests.
        defaults: sampling parameters that the checkpoint recommends.
        created: when the server started, in seconds since 1970.
    """

    engine: AsyncLLM
    config: ServerConfig
    times: RequestTimes
    defaults: SamplingParams
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give as ``model``; the first is shown in answers."""
        return served_names(self.config, self.engine.resolved.model)

    def name(self, asked: str | None) -> str:
        """The model's name in the answer to a request.

        Raises:
            ApiError: no model has the name that was asked for.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            known = " or ".join(map(repr, self.names))
            raise ApiError(
                404,
                f"the model {shown(asked)} does not exist. Use {known}",
                param="model",
                code="model_not_found",
            )
        return asked

    def cards(self) -> list[ModelCard]:
        """The model under each of its names."""
        resolved = self.engine.resolved
        return [
            ModelCard(
                id=name,
                object="model",
                created=self.created,
                owned_by="sametoken",
                root=self.names[0],
                max_model_len=resolved.max_model_len,
            )
            for name in self.names
        ]

    def check(self, num_prompts: int, params: SamplingParams) -> None:
        """Look at a request before any of its prompts is made into tokens.

        Raises:
            ApiError: there are too many completions, or more drafts are asked for than k.
        """
        num_completions, most = num_prompts * params.n, self.config.max_completions
        if num_completions > most:
            raise invalid(
                f"the request is for {num_completions} completions and at most {most} are allowed. "
                "Send several requests",
                "n",
            )
        k, asked = self.engine.resolved.num_speculative_tokens, params.num_speculative_tokens
        if asked is not None and asked > k:
            raise invalid(
                f"num_speculative_tokens={asked} is above the {k} of this server. Use 0 to {k}",
                "speculative",
            )

    async def begin(
        self, prompts: Sequence[PromptTokens], params: SamplingParams, request_id: str
    ) -> Generation:
        """Begin all prompts of a request, or none.

        Raises:
            RequestError, OverloadedError, DrainingError, EngineDeadError: the engine refuses.
        """
        return await Generation.begin(self.engine, prompts, params, request_id, self.times)

    async def tokenize(
        self, prompt: str | list[int], *, add_special_tokens: bool = True
    ) -> PromptTokens:
        """A prompt's token ids; the event loop goes on meanwhile.

        Raises:
            RequestError: it is a text, and too long to fit or there is no tokenizer.
        """
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        return await asyncio.to_thread(
            self.engine.tokenize, given, add_special_tokens=add_special_tokens
        )

    async def render(
        self, messages: Sequence[Message], given: dict[str, Any] | None, **options: Any
    ) -> PromptTokens:
        """The prompt that a conversation makes; the event loop goes on meanwhile.

        Args:
            messages: as the client sent them.
            given: the client's own variables for the template.
            options: the server's.

        Raises:
            ApiError: the client sets what is the server's, or a message is no text.
            RequestError: there is no chat template, or it refuses.
        """
        for name in given or {}:
            if name in _RESERVED:
                raise invalid(
                    f"chat_template_kwargs may not set {name!r}. Leave it out",
                    "chat_template_kwargs",
                )
        every = {**(given or {}), **options}

        def render() -> PromptTokens:
            return self.engine.render_chat(template_messages(messages), **every)

        return await asyncio.to_thread(render)

    def tool_parser(self, tools: Sequence[Tool]) -> ToolParser | None:
        """The parser for the model's calls of these tools; None if there is none."""
        name: str | None = self.config.tool_call_parser
        if name == AUTO:
            name = parser_of_template(str(self.engine.get_tokenizer().hf.chat_template or ""))
        if name is None or name == NONE:
            return None
        functions = [tool.function for tool in tools]
        return TOOL_PARSERS[name]({one.name: one.parameters or {} for one in functions})


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """Names of the model in the API: those given, or the one that it was loaded by."""
    return config.served_model_name or (model,)

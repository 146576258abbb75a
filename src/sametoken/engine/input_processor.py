"""From prompts as users write them to requests of token ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sametoken.core.request import EngineRequest
from sametoken.core.sampling_params import SamplingParams
from sametoken.core.seeds import derive_seed
from sametoken.core.structured_outputs import Grammar
from sametoken.engine.grammar import GrammarCompiler
from sametoken.engine.tokenizer import Tokenizer
from sametoken.errors import RequestError
from sametoken.verification.admission import require_choosable

#: A text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.
Prompt = str | Mapping[str, Any]

_PROMPT_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as text, if it came as one, and as token ids."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """One prompt's requests to the engine, one per completion.

    Attributes:
        request_id: what the user knows it by.
        prompt: the prompt.
        params: sampling parameters as given.
        completions: ``params.n`` requests with ids and seeds of their own.
    """

    request_id: str
    prompt: PromptTokens
    params: SamplingParams
    completions: tuple[EngineRequest, ...]


class InputProcessor:
    """Checks requests and resolves what they leave open.

    Args:
        tokenizer: None if prompts are token ids only.
        vocab_size: the model's; every token id lies below.
        max_model_len: prompt and output together, in tokens.
        eos_token_ids: tokens that end a completion unless ``ignore_eos`` is set.
        num_speculative_tokens: k; a request may ask for as many drafts or fewer.
        seed: requests without a seed draw theirs from this one, in order.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        num_speculative_tokens: int,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._num_speculative_tokens = num_speculative_tokens
        self._seed = seed
        self._grammars: GrammarCompiler | None = None
        # Index 0 of derive_seed is the seed itself, so the draws start at 1.
        self._draws = itertools.count(1)

    def process(
        self, request_id: str, prompt: PromptTokens, params: SamplingParams
    ) -> ProcessedRequest:
        """Check one prompt with its parameters and make its requests.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        self._check_prompt(prompt.token_ids)
        self._check_params(params)
        limit = self._max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt.token_ids) + params.max_tokens)
        eos = () if params.ignore_eos else self._eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *_ids(params.stop_token_ids))))
        bad_words = self._bad_words(params)
        require_choosable(params, self._vocab_size, stop_ids, bad_words)
        first = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_total_tokens=limit,
            stop_token_ids=stop_ids,
            bad_words_token_ids=bad_words,
            grammar=self._grammar(params),
            max_drafts=params.num_speculative_tokens,
        )
        seed = params.seed
        if seed is None:
            seed = derive_seed(self._seed, next(self._draws))
        completions = tuple(
            replace(
                first,
                request_id=request_id if params.n == 1 else f"{request_id}.{index}",
                params=replace(params, n=1, seed=derive_seed(seed, index)),
            )
            for index in range(params.n)
        )
        return ProcessedRequest(request_id, prompt, params, completions)

    def tokenize(self, prompt: Prompt) -> PromptTokens:
        """The token ids of a prompt in any of its forms.

        Raises:
            RequestError: it has another form, or it is a text and there is no tokenizer.
        """
        if isinstance(prompt, str):
            return self._tokenize_text(prompt)
        if not isinstance(prompt, Mapping):
            raise RequestError(
                f"a prompt of type {type(prompt).__name__} is not possible",
                'give a string, {"prompt": text} or {"prompt_token_ids": [...]}',
            )
        unknown = [key for key in prompt if key not in _PROMPT_KEYS]
        if unknown or len(prompt) != 1:
            raise RequestError(
                f"a prompt with the keys {list(prompt)} is not possible",
                'give exactly one of "prompt" and "prompt_token_ids"',
            )
        if "prompt" in prompt:
            return self._tokenize_text(prompt["prompt"])
        token_ids = prompt["prompt_token_ids"]
        if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
            raise RequestError(
                f"prompt_token_ids of type {type(token_ids).__name__} is not possible",
                "give a list of integers",
            )
        return PromptTokens(None, tuple(token_ids))

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> PromptTokens:
        """The prompt that the chat template makes of a conversation.

        Raises:
            RequestError: no tokenizer, no chat template, or messages that it refuses.
        """
        tokenizer = self._require_tokenizer("chat messages")
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError(
                "a conversation needs messages", 'give a list of {"role": ..., "content": ...}'
            )
        text = tokenizer.apply_chat_template(messages, **options)
        return PromptTokens(text, tokenizer.encode(text, add_special_tokens=False))

    def _tokenize_text(self, text: object) -> PromptTokens:
        if not isinstance(text, str):
            raise RequestError(
                f"a prompt text of type {type(text).__name__} is not possible", "give a string"
            )
        return PromptTokens(text, self._require_tokenizer("a text prompt").encode(text))

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer but skip_tokenizer_init is set",
                'give {"prompt_token_ids": [...]}, or load the tokenizer',
            )
        return self._tokenizer

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty", "give at least one token")
        longest = self._max_model_len - 1
        if len(token_ids) > longest:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and at most {longest} fit "
                "(max_model_len - 1)",
                "shorten it or raise max_model_len",
            )
        self._check_ids("prompt_token_ids", token_ids)

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling parameters of type {type(params).__name__} are not possible",
                "give SamplingParams",
            )
        self._check_ids("stop_token_ids", _ids(params.stop_token_ids))
        self._check_ids("allowed_token_ids", _ids(params.allowed_token_ids))
        self._check_ids("logit_bias", tuple(params.logit_bias or {}))
        if params.stop:
            self._require_tokenizer("a stop string")
        own, most = params.num_speculative_tokens, self._num_speculative_tokens
        if own is not None and own > most:
            raise RequestError(
                f"num_speculative_tokens={own} is above the engine's {most}",
                f"use 0 to {most}, or None for the engine's own",
            )

    def _check_ids(self, name: str, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise RequestError(f"{name} holds {token_id!r}", "give integers")
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{name} holds {token_id}, outside the vocabulary of {self._vocab_size}",
                    f"use ids from 0 to {self._vocab_size - 1}",
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Every bad word as it reads at the start of a text and after a space."""
        if not params.bad_words:
            return ()
        tokenizer = self._require_tokenizer("a bad word")
        sequences: list[tuple[int, ...]] = []
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                token_ids = tokenizer.encode(text, add_special_tokens=False)
                if token_ids and token_ids not in sequences:
                    sequences.append(token_ids)
        return tuple(sequences)

    def prepare(self, params: SamplingParams) -> None:
        """Do what ``process`` would take long for: it is kept. Any thread may call this.

        Raises:
            RequestError: the grammar cannot be honoured.
        """
        self._grammar(params)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """What ``structured_outputs`` compiles to. The compiler is made for the first one."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            tokenizer = self._require_tokenizer("structured_outputs")
            self._grammars = GrammarCompiler(tokenizer, self._vocab_size, self._eos_token_ids)
        return self._grammars.compile(params.structured_outputs)


def _ids(values: tuple[int, ...] | list[int] | None) -> tuple[int, ...]:
    return tuple(values or ())

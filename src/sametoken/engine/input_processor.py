"""Input processing: prompts and sampling parameters of users to requests of token ids."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sametoken.engine.grammars import RequestGrammars
from sametoken.engine.user_inputs import (
    Prompt,
    PromptTokens,
    plain_messages,
    require_fitting,
    template_variables,
    text_or_ids,
    too_long,
)
from sametoken.errors import RequestError, shown
from sametoken.sampling.admission import require_choosable
from sametoken.text.grammar.grammar import GrammarTrials
from sametoken.text.grammar.trials import ThreadTrials
from sametoken.text.stop_strings import StopStrings
from sametoken.text.tokenizer import Messages, Tokenizer, require_tokenizer
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams, derive_seed
from sametoken.types.structured_outputs import Grammar


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """One prompt's requests to the engine, one per completion.

    Attributes:
        request_id: the user's request id.
        prompt: the prompt.
        params: sampling parameters as given.
        completions: ``params.n`` requests, each with its own id and seed.
        stops: finds the stop strings in each completion.
    """

    request_id: str
    prompt: PromptTokens
    params: SamplingParams
    completions: tuple[EngineRequest, ...]
    stops: StopStrings

    def prepared(self) -> Self:
        """The same once its grammar is compiled here: in a step an error would end the engine.

        Raises:
            OverloadedError: other grammars take up the memory.
        """
        if (grammar := self.completions[0].grammar) is not None:
            grammar.prepare()
        return self


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """Checked sampling parameters, resolved for this model.

    Attributes:
        given: as the user gave them.
        stop_token_ids: EOS and stop ids.
        bad_words_token_ids: token sequences that must not be completed.
        grammar: the compiled ``structured_outputs``.
        stops: finds the stop strings.
    """

    given: SamplingParams
    stop_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    grammar: Grammar | None
    stops: StopStrings


class InputProcessor:
    """Checks requests and resolves their defaults.

    Args:
        tokenizer: None if prompts are token ids only.
        vocab_size: token ids must be below this.
        max_model_len: maximum length of prompt and output together, in tokens.
        eos_token_ids: tokens that end a completion unless ``ignore_eos`` is set.
        num_speculative_tokens: k, the maximum for a request's own limit.
        seed: seeds of requests without one are derived from it, in order.
        trials: where a new grammar is tried before use; by default in this process.

    Attributes:
        grammars: makes those of requests.
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
        trials: GrammarTrials | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._num_speculative_tokens = num_speculative_tokens
        self._seed = seed
        self.grammars = RequestGrammars(
            tokenizer, vocab_size, eos_token_ids, trials or ThreadTrials()
        )
        # Index 0 of derive_seed is the seed itself, so drawn seeds start at 1.
        self._draws = itertools.count(1)

    def process(
        self,
        request_id: str,
        prompt: PromptTokens,
        params: SamplingParams,
        lora_name: str | None = None,
    ) -> ProcessedRequest:
        """Check one prompt with its parameters and create its requests, of an adapter's name.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
            OverloadedError: other grammars take up the compiler or the memory.
        """
        self._check_prompt(prompt.token_ids)
        return self._make(request_id, prompt, self._resolve(params), lora_name)

    def process_all(
        self,
        request_id: str,
        prompts: Sequence[PromptTokens],
        params: SamplingParams,
        lora_name: str | None = None,
    ) -> list[ProcessedRequest]:
        """``process`` for several prompts with the same parameters; prompt i is ``ID-i``.

        All slow work for a request happens here. Any thread may call it.
        """
        for prompt in prompts:
            self._check_prompt(prompt.token_ids)
        resolved = self._resolve(params)
        return [
            self._make(f"{request_id}-{index}", prompt, resolved, lora_name)
            for index, prompt in enumerate(prompts)
        ]

    def _resolve(self, params: SamplingParams) -> ResolvedParams:
        self._check_params(params)
        eos = () if params.ignore_eos else self._eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))
        bad_words = self._bad_words(params)
        require_choosable(params, self._vocab_size, stop_ids, bad_words)
        stops = StopStrings(tuple(params.stop or ()))
        return ResolvedParams(params, stop_ids, bad_words, self.grammars.of(params), stops)

    def _make(
        self,
        request_id: str,
        prompt: PromptTokens,
        resolved: ResolvedParams,
        lora_name: str | None,
    ) -> ProcessedRequest:
        params = resolved.given
        limit = self._max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt.token_ids) + params.max_tokens)
        first = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_total_tokens=limit,
            stop_token_ids=resolved.stop_token_ids,
            bad_words_token_ids=resolved.bad_words_token_ids,
            grammar=self.grammars.bounded(resolved.grammar, params, prompt.token_ids),
            num_speculative_tokens=params.num_speculative_tokens,
            lora_name=lora_name,
        )
        seed = derive_seed(self._seed, next(self._draws)) if params.seed is None else params.seed
        completions = tuple(
            replace(
                first,
                request_id=request_id if params.n == 1 else f"{request_id}.{index}",
                params=params.of_completion(derive_seed(seed, index), index),
            )
            for index in range(params.n)
        )
        return ProcessedRequest(request_id, prompt, params, completions, resolved.stops)

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> PromptTokens:
        """Tokenize a prompt of any form.

        Args:
            prompt: the prompt.
            add_special_tokens: whether the tokenizer adds its special tokens to a text.

        Raises:
            RequestError: the prompt has another form, is too long, or is text without a
                tokenizer.
        """
        if isinstance(prompt, PromptTokens):
            return prompt
        given = text_or_ids(prompt, self._max_model_len - 1)
        if isinstance(given, tuple):
            return PromptTokens(None, given)
        tokenizer = require_tokenizer(self.tokenizer, "a text prompt")
        self._require_short(len(given), tokenizer)
        return PromptTokens(given, tokenizer.encode(given, add_special_tokens=add_special_tokens))

    def tokenize_chat(self, messages: Messages, **options: Any) -> PromptTokens:
        """Apply the chat template to a conversation and tokenize the result.

        Raises:
            RequestError: no tokenizer, no chat template, messages that it refuses, or too much
                text.
        """
        tokenizer = require_tokenizer(self.tokenizer, "a conversation")
        plain = plain_messages(messages)
        self._require_short(sum(len(message["content"]) for message in plain), tokenizer)
        text = tokenizer.apply_chat_template(plain, **template_variables(options))
        self._require_short(len(text), tokenizer)
        return PromptTokens(text, tokenizer.encode(text, add_special_tokens=False))

    def _require_short(self, num_characters: int, tokenizer: Tokenizer) -> None:
        """Refuse a text that is too long for any tokenization, before tokenizing it."""
        most = self._max_model_len * tokenizer.max_token_chars
        if num_characters > most:
            raise too_long(
                f"{num_characters} characters > {most} maximum: this model's maximum context "
                f"length is {self._max_model_len} tokens"
            )

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            remedy = "give at least one token"
            raise RequestError("the prompt is empty", remedy, param="prompt_token_ids")
        require_fitting(len(token_ids), self._max_model_len - 1)
        self._check_ids("prompt_token_ids", token_ids)

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling parameters of type {type(params).__name__} are not possible",
                "give SamplingParams",
            )
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or {})
        if params.stop:
            require_tokenizer(self.tokenizer, "a stop string")
        own, most = params.num_speculative_tokens, self._num_speculative_tokens
        if own is not None and own > most:
            remedy = f"use 0 to {most}, or None for the engine's own"
            raise RequestError(
                f"num_speculative_tokens={shown(own)} is above the engine's {most}",
                remedy if most else "give the engine a speculative_config, or leave this out",
            )

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        # Whole-list built-ins: a Python loop is slow for the longest prompts.
        kinds = set(map(type, token_ids))
        if not all(issubclass(kind, int) and kind is not bool for kind in kinds):
            wrong = next(i for i in token_ids if not isinstance(i, int) or isinstance(i, bool))
            raise RequestError(f"{name} holds {shown(wrong)}", "give integers", param=name)
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{name} holds {shown(token_id)}, outside the vocabulary of {self._vocab_size}",
                    f"use ids from 0 to {self._vocab_size - 1}",
                    param=name,
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of every bad word, without a space before it and with one."""
        if not params.bad_words:
            return ()
        tokenizer = require_tokenizer(self.tokenizer, "a bad word")
        texts = (text for word in params.bad_words for text in _spellings(word))
        sequences = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return tuple(dict.fromkeys(token_ids for token_ids in sequences if token_ids))


def _spellings(word: str) -> tuple[str, ...]:
    """A word at the start of a text and after a space; spaces alone stand for themselves."""
    bare = word.lstrip(" ")
    return (bare, f" {bare}") if bare else (word,)

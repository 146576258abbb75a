"""Grammars of requests: compiled from their parameters, with one compiler of the tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from sametoken.errors import RequestError, shown
from sametoken.text.grammar.after_reasoning import GrammarAfterReasoning
from sametoken.text.grammar.grammar import GrammarCompiler, GrammarTrials
from sametoken.text.reasoning_marks import BUDGET, ReasoningMarks, no_marks
from sametoken.text.tokenizer import Tokenizer, require_tokenizer
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import PARAM, Grammar, Reasoning


class RequestGrammars:
    """Makes the grammars of requests.

    Args:
        tokenizer: None if there is none, and so no grammar.
        vocab_size: the model's.
        eos_token_ids: end-of-text token ids.
        trials: where a new grammar is tried before use.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        trials: GrammarTrials,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._trials = trials
        self._made: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def knows(self, params: SamplingParams) -> bool:
        """Whether nothing has to be compiled, or it is already."""
        structured, made = params.structured_outputs, self._made
        if structured is None or structured.has_any_text:
            return True
        return made is not None and made.knows(structured)

    def start_trials(self) -> None:
        """Start the compiler's process in advance, so that the first grammar need not wait.

        Raises:
            RequestError: there is no tokenizer that grammars can use.
            OverloadedError: a process cannot be started.
        """
        self._compiler()

    def of(self, params: SamplingParams) -> Grammar | None:
        """The compiled ``structured_outputs``, or None.

        Raises:
            RequestError: the reasoning before the text is impossible, or see ``GrammarCompiler``.
            OverloadedError: see ``GrammarCompiler``.
        """
        structured, budget = params.structured_outputs, params.thinking_token_budget
        if structured is None:
            return None
        reasoning = structured.reasoning
        if reasoning is not None:
            if budget is not None:
                reasoning = replace(reasoning, budget=budget)
                structured = replace(structured, reasoning=reasoning)
            self._check(reasoning, params)
            if structured.has_any_text:
                return GrammarAfterReasoning(None, reasoning)
        try:
            return self._compiler().compile(structured)
        except RequestError as error:
            # It may come from another process, which knows no parameters.
            raise RequestError(error.cause, error.remedy, param=PARAM) from error

    def bounded(
        self, grammar: Grammar | None, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> Grammar | None:
        """The grammar of a completion, which may be a budget of its reasoning alone.

        Args:
            grammar: what ``of`` gives for the parameters. Without reasoning before it, there is
                nothing to bound.
            params: of the request.
            prompt_ids: of the completion.

        Raises:
            RequestError: no token is known to end the reasoning, or it is not allowed.
        """
        budget = params.thinking_token_budget
        if budget is None or grammar is not None:
            return grammar
        marks = ReasoningMarks.of(require_tokenizer(self._tokenizer, BUDGET), self._eos_token_ids)
        if marks is None:
            raise no_marks()
        reasoning = marks.bounded(budget, prompt_ids)
        self._check(reasoning, params)
        return GrammarAfterReasoning(None, reasoning)

    def _check(self, reasoning: Reasoning, params: SamplingParams) -> None:
        for token_id in reasoning.token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"structured_outputs.reasoning holds {token_id}, outside the vocabulary of "
                    f"{self._vocab_size}",
                    f"use ids from 0 to {self._vocab_size - 1}",
                    param=PARAM,
                )
        allowed = params.allowed_token_ids
        if reasoning.budget is not None and allowed is not None and set(reasoning.end) - {*allowed}:
            raise RequestError(
                "allowed_token_ids leaves out what ends the reasoning, which has a budget",
                f"allow {shown(reasoning.end)} too, or leave {BUDGET} out",
                param="allowed_token_ids",
            )

    def _compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._made is None:
                tokenizer = require_tokenizer(self._tokenizer, "structured_outputs")
                self._made = GrammarCompiler(
                    tokenizer, self._vocab_size, self._eos_token_ids, self._trials
                )
            return self._made

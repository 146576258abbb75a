"""Grammars of requests: compiled from their parameters, with one compiler of the tokenizer."""

from __future__ import annotations

import threading

from sametoken.errors import RequestError
from sametoken.text.grammar.grammar import GrammarCompiler, GrammarTrials
from sametoken.text.tokenizer import Tokenizer, require_tokenizer
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import PARAM, Grammar


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
        """Whether no grammar is requested, or the requested one is already compiled."""
        structured, made = params.structured_outputs, self._made
        return structured is None or (made is not None and made.knows(structured))

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
            RequestError, OverloadedError: see ``GrammarCompiler``.
        """
        if params.structured_outputs is None:
            return None
        try:
            return self._compiler().compile(params.structured_outputs)
        except RequestError as error:
            # It may come from another process, which knows no parameters.
            raise RequestError(error.cause, error.remedy, param=PARAM) from error

    def _compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._made is None:
                tokenizer = require_tokenizer(self._tokenizer, "structured_outputs")
                self._made = GrammarCompiler(
                    tokenizer, self._vocab_size, self._eos_token_ids, self._trials
                )
            return self._made

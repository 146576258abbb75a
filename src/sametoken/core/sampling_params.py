"""Sampling parameters, with vLLM's names and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sametoken.core.structured_outputs import StructuredOutputs
from sametoken.errors import RequestError

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
#: The device holds these numbers in 32 bits.
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Checked on construction.

    Attributes:
        n: completions per prompt, each with a seed of its own derived from ``seed``.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set whose probability reaches this.
        min_p: keep tokens at least this fraction as likely as the best.
        seed: names the noise; with it the output is reproducible. None draws one.
        logprobs, prompt_logprobs: candidates to report per position; 0 reports the chosen one.
        logit_bias: added to the logits of these ids.
        allowed_token_ids: every other id is masked.
        structured_outputs: the form that the text must have.
        num_speculative_tokens: this request's own limit on drafts per step, up to the
            engine's; 0 decodes plainly, None takes the engine's. It changes no token.

    Raises:
        RequestError: a value is out of range or two contradict each other.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] | str | list[str] | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    bad_words: tuple[str, ...] | list[str] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_numbers()
        self._check_sequences()
        structured = self.structured_outputs
        fits = structured is None or isinstance(structured, StructuredOutputs)
        _require(fits, "structured_outputs", structured, "give StructuredOutputs")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def has_cuts(self) -> bool:
        """Whether unlikely tokens lose their chance."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def _check_numbers(self) -> None:
        _require(_is_int(self.n) and self.n >= 1, "n", self.n, "use an integer of at least 1")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            fits = _is_number(value) and low <= value <= high
            _require(fits, name, value, f"use a number from {low} to {high}")
        _require(self.top_p > 0, "top_p", self.top_p, "use a number above 0 and up to 1")
        positive = self.repetition_penalty > 0
        _require(positive, "repetition_penalty", self.repetition_penalty, "use a number above 0")
        fits = _is_int(self.top_k) and 0 <= self.top_k <= MAX_COUNT
        _require(fits, "top_k", self.top_k, f"use -1, or an integer from 0 to {MAX_COUNT}")
        if self.seed is not None:
            fits = _is_int(self.seed) and 0 <= self.seed <= MAX_SEED
            _require(fits, "seed", self.seed, f"use an integer from 0 to {MAX_SEED}")
        if self.max_tokens is not None:
            fits = _is_int(self.max_tokens) and self.max_tokens >= 1
            _require(fits, "max_tokens", self.max_tokens, "use at least 1, or None for no limit")
        fits = _is_int(self.min_tokens) and 0 <= self.min_tokens <= MAX_COUNT
        _require(fits, "min_tokens", self.min_tokens, f"use an integer from 0 to {MAX_COUNT}")
        own = self.num_speculative_tokens
        fits = own is None or (_is_int(own) and own >= 0)
        _require(fits, "num_speculative_tokens", own, "use None, 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}",
                "raise max_tokens or lower min_tokens",
            )

    def _check_sequences(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            fits = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
            _require(fits, name, value, f"use None or an integer from 0 to {MAX_LOGPROBS}")
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                _require(isinstance(text, str) and text != "", name, text, "use non-empty strings")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text but detokenize is off", "drop one of them")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty, so no token is allowed", "name some")
        for token_id, bias in (self.logit_bias or {}).items():
            fits = _is_int(token_id) and _is_number(bias) and math.isfinite(bias)
            _require(fits, "logit_bias", {token_id: bias}, "map token ids to finite numbers")


_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
)


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise RequestError(f"{name}={value!r} is not possible", remedy)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

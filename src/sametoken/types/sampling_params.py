"""Sampling parameters with vLLM's names and defaults, and the seeds of completions."""

from __future__ import annotations

import copy
import hashlib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sametoken.errors import RequestError, shown
from sametoken.types.option_values import refusing_unknown
from sametoken.types.structured_outputs import StructuredOutputs

#: Parameters that a checkpoint's generation_config.json may recommend, by their names in it.
RECOMMENDED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
MAX_LOGPROBS = 20
#: Completions per prompt.
MAX_N = 2**16
#: Stop strings per request, and characters of each.
MAX_STOPS, MAX_STOP_CHARS = 128, 256
#: Bad words per request, and characters of each.
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 1024, 256
MAX_STOP_TOKEN_IDS = 1024
#: Entries of ``logit_bias``, and the largest magnitude: far above it fp32 overflows to infinity.
MAX_LOGIT_BIAS, MAX_BIAS = 4096, 1e30
#: Logits are divided by it: far below, fp32 takes it for 0 or overflows, the largest bias first.
MIN_REPETITION_PENALTY = 1e-8
#: Token ids in any other list; the vocabulary and ``max_model_len`` set tighter bounds.
MAX_TOKEN_IDS = 2**20
MAX_SEED = 2**63 - 1
#: The device stores these numbers as int32.
MAX_COUNT = 2**31 - 1

#: Names of vLLM and transformers that are no parameters here.
ELSEWHERE = {
    "best_of": "use n",
    "do_sample": "use temperature, which 0 makes greedy",
    "extra_args": "leave it out",
    "guided_decoding": "use structured_outputs",
    "logits_processors": "use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    "max_new_tokens": "use max_tokens",
    "num_return_sequences": "use n",
    "output_kind": "use LLM.generate_stream or AsyncLLM for parts of an answer",
    "truncate_prompt_tokens": "shorten the prompt",
}


@refusing_unknown(ELSEWHERE)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, checked on construction.

    Frozen: ``dataclasses.replace(params, seed=7)`` makes a changed copy.

    Attributes:
        n: completions per prompt, each with its own seed derived from ``seed``.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        seed: makes the output reproducible; None or -1 draws one. Other negative integers of 64
            bits are kept without their sign bit, as the device's seeds have none.
        stop, bad_words: a list of texts, or one text.
        logprobs, prompt_logprobs: candidates to report per position; 0 reports the chosen one.
        logit_bias: added to the logits of these ids.
        allowed_token_ids: every other id is masked.
        spaces_between_special_tokens: False joins added tokens that follow each other, where they
            are shown and the tokenizer's decoder would write spaces.
        structured_outputs: constrains the text.
        thinking_token_budget: tokens of reasoning after which its end is forced; None or -1: as
            many as the model writes.
        num_speculative_tokens: limit on drafts per step, up to the engine's; 0 disables
            speculation, None takes the engine's. It changes no token.

    Raises:
        RequestError: a value has the wrong type or is out of range, or two contradict.
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
    bad_words: tuple[str, ...] | str | list[str] | None = ()
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
    thinking_token_budget: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in _NUMBERS:
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        for name, most, longest in _TEXTS:
            object.__setattr__(self, name, _texts(name, getattr(self, name), most, longest))
        stops = _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop_token_ids", stops)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_TOKEN_IDS)
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if _is_int(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if _is_int(self.thinking_token_budget) and self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        if isinstance(self.seed, int) and self.seed < 0:
            object.__setattr__(self, "seed", _without_sign(self.seed))
        self._check_numbers()
        self._check_together()

    def of_completion(self, seed: int, index: int = 0) -> SamplingParams:
        """A copy for one completion, without checking again.

        The prompt is the same for all, so its candidates come with completion 0 alone.
        """
        own = copy.copy(self)
        object.__setattr__(own, "n", 1)
        object.__setattr__(own, "seed", seed)
        if index:
            object.__setattr__(own, "prompt_logprobs", None)
        return own

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a presence, frequency or repetition penalty is set."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _check_kinds(self) -> None:
        for name in _SWITCHES:
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "use True or False")
        structured = self.structured_outputs
        fits = structured is None or isinstance(structured, StructuredOutputs)
        _require(fits, "structured_outputs", structured, "use StructuredOutputs")

    def _check_numbers(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            fits = _is_number(value) and low <= value <= high
            _require(fits, name, value, f"use a number from {low} to {high}")
        _require(self.top_p > 0, "top_p", self.top_p, "use a number above 0 and up to 1")
        divides = self.repetition_penalty >= MIN_REPETITION_PENALTY
        remedy = f"use a number from {MIN_REPETITION_PENALTY} to 100"
        _require(divides, "repetition_penalty", self.repetition_penalty, remedy)
        for name, low, high, otherwise in _INTEGERS:
            value = getattr(self, name)
            fits = _is_int(value) and low <= value <= high
            _require(fits, name, value, f"use {otherwise}an integer from {low} to {high}")
        for name, low, high in _OPTIONAL_INTEGERS:
            value = getattr(self, name)
            fits = value is None or (_is_int(value) and low <= value <= high)
            bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            _require(fits, name, value, f"use None or an integer {bounds}")

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {shown(self.max_tokens)}",
                "raise max_tokens or lower min_tokens",
                param="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text but detokenize is off", "drop one of them")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty, so no token is allowed",
                "name some",
                param="allowed_token_ids",
            )


_SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_TEXTS = (("stop", MAX_STOPS, MAX_STOP_CHARS), ("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS))
_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
)


_INTEGERS = (
    ("n", 1, MAX_N, ""),
    ("top_k", 0, MAX_COUNT, "-1, or "),
    ("min_tokens", 0, MAX_COUNT, ""),
)
_OPTIONAL_INTEGERS = (
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("max_tokens", 1, math.inf),
    ("thinking_token_budget", 0, math.inf),
    ("num_speculative_tokens", 0, math.inf),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_NUMBERS = tuple(name for name, *_ in (*_RANGES, *_INTEGERS, *_OPTIONAL_INTEGERS))


def plain_number(value: Any) -> Any:
    """A number of numpy as Python's own; anything else as it is."""
    if isinstance(value, int | float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _texts(name: str, given: Any, most: int, longest: int) -> tuple[str, ...]:
    texts: tuple[Any, ...] = (given,) if isinstance(given, str) else _items(name, given, most)
    for text in texts:
        _require(isinstance(text, str) and text != "", name, text, "use non-empty strings")
        if len(text) > longest:
            raise RequestError(
                f"{name} has a text of {len(text)} characters and at most {longest} are possible",
                "use shorter texts",
                param=name,
            )
    return texts


def _token_ids(name: str, given: Any, most: int) -> tuple[int, ...]:
    token_ids = tuple(map(plain_number, _items(name, given, most)))
    for token_id in token_ids:
        _require(_is_int(token_id), name, token_id, "use a list of integers")
    return token_ids


def _items(name: str, given: Any, most: int) -> tuple[Any, ...]:
    """The items of a list, an array or an iterator, which may be infinite."""
    if given is None:
        return ()
    fits = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    _require(fits, name, given, "use a list")
    items: tuple[Any, ...] = _read(name, given, tuple, most)
    return items


def _biases(given: Any) -> dict[int, float]:
    _require(isinstance(given, Mapping), "logit_bias", given, "map token ids to finite numbers")
    read: dict[Any, Any] = _read("logit_bias", given.items(), dict, MAX_LOGIT_BIAS)
    biases = {plain_number(token_id): plain_number(bias) for token_id, bias in read.items()}
    for token_id, bias in biases.items():
        fits = _is_int(token_id) and _is_number(bias) and abs(bias) <= MAX_BIAS
        _require(fits, "logit_bias", {token_id: bias}, "map token ids to finite numbers")
    return biases


def _read(name: str, given: Iterable[Any], make: Callable[[Iterable[Any]], Any], most: int) -> Any:
    """Read up to ``most`` items; more are refused once there is one too many."""
    try:
        items = make(islice(given, most + 1))
    except Exception as error:
        # An iterator of an arbitrary class may raise anything.
        raise RequestError(
            f"{name} cannot be read ({shown(error)})", "use a list", param=name
        ) from error
    if len(items) > most:
        raise RequestError(f"{name} has more than {most} entries", "use fewer", param=name)
    return items


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise RequestError(f"{name}={shown(value)} is not possible", remedy, param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _without_sign(seed: int) -> int | None:
    """A negative seed as the device stores it, None for -1; out of range if it was before."""
    if seed == -1:
        return None
    return seed & MAX_SEED if seed >= -MAX_SEED - 1 else seed


def derive_seed(seed: int, index: int | str) -> int:
    """The seed of completion ``index``, or of an id, in 0..2^63-1; completion 0 keeps ``seed``.

    A hash, not ``seed + index``, so that requests with neighbouring seeds share no noise.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def replica_seed(seed: int, rank: int) -> int:
    """The seed of one of several engines; the first keeps ``seed``.

    By a word, as numbers are those of requests that draw a seed, and of their completions.
    """
    return derive_seed(seed, f"replica {rank}" if rank else 0)

"""Rollouts with a trainer's log-probabilities: of a file, or of a callback (docs/audit.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.errors import ConfigError, in_words, shown
from sametoken.io.files import read_json
from sametoken.io.json_text import json_lines
from sametoken.types.option_values import listed
from sametoken.types.outputs import RequestOutput

#: Tokens of all rollouts of an audit: they stay in memory.
MAX_TOKENS = 2**22
_MAX_ID = 2**31 - 1
_MAX_VERSION = 2**63 - 1
#: A logarithm's rounding may lift a probability of 1 above 0.
_MAX_LOGPROB = 1e-3
#: Below what masks of fp32 give; the sum of all tokens' stays finite.
_MIN_LOGPROB = -1e39
_TEMPERATURES = (1e-2, 1e2)
_KEYS = (
    "id",
    "token_ids",
    "prompt_length",
    "logprobs",
    "temperature",
    "weight_version",
    "messages",
)
_FORMAT = "docs/audit.md has the format"

#: Scores tokens: (prompt and answer, length of the prompt) to a log-probability per answer token.
Trainer = Callable[[tuple[int, ...], int], Iterable[float]]


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One rollout as a trainer scored it.

    Attributes:
        name: for reports.
        token_ids: prompt and answer, as the trainer's forward pass took them.
        prompt_len: tokens of the prompt, at least one; at least one of the answer follows.
        logprobs: of each token of the answer, given all tokens before it; natural logarithms.
        temperature: ``logprobs`` are said to be of softmax(logits / temperature).
        weight_version: of the weights that are said to have given them; None if unknown.
        messages: the conversation that the prompt is said to hold; None if unknown.
    """

    name: str
    token_ids: tuple[int, ...]
    prompt_len: int
    logprobs: tuple[float, ...]
    temperature: float = 1.0
    weight_version: int | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


def read_rollouts(path: Path, limit: int | None = None) -> tuple[ScoredRollout, ...]:
    """Read the first rollouts of a file: JSON lines, or in a .json file one list.

    Args:
        path: the file; .gz is decompressed.
        limit: the most rollouts to read; None: all.

    Raises:
        ConfigError: the file cannot be read, is malformed, or has more than ``MAX_TOKENS`` tokens.
    """
    rollouts: list[ScoredRollout] = []
    num_tokens = 0
    for number, value in _values(path):
        if len(rollouts) == limit:
            break
        rollouts.append(rollout_of(value, f"{path}, rollout {number}", name=str(number)))
        num_tokens += len(rollouts[-1].token_ids)
        if num_tokens > MAX_TOKENS:
            raise ConfigError(
                f"{path} has more than {MAX_TOKENS} tokens in its first {number} rollouts",
                "audit fewer, by --limit",
            )
    if not rollouts:
        raise ConfigError(f"{path} holds no rollouts", _FORMAT)
    return tuple(rollouts)


def scored_by(
    trainer: Trainer, outputs: Iterable[RequestOutput], temperature: float = 1.0
) -> tuple[ScoredRollout, ...]:
    """Let a trainer score every token that was generated.

    Args:
        trainer: called once per completion.
        outputs: of ``LLM.generate``; completions without tokens are left out.
        temperature: of the trainer's log-probabilities.

    Raises:
        ConfigError: the trainer gives another number of log-probabilities, or impossible ones.
    """
    return tuple(
        rollout_of(
            {
                "token_ids": [*output.prompt_token_ids, *completion.token_ids],
                "prompt_length": len(output.prompt_token_ids),
                "logprobs": _scores(trainer, output.prompt_token_ids, completion.token_ids),
                "temperature": temperature,
                "weight_version": _version_of(output),
            },
            f"the trainer, request {output.request_id}",
            name=f"{output.request_id}/{completion.index}",
        )
        for output in outputs
        for completion in output.outputs
        if completion.token_ids
    )


def rollout_of(value: Any, place: str, *, name: str) -> ScoredRollout:
    """Check one rollout.

    Args:
        value: an object as in a file.
        place: for messages.
        name: used if the object has no "id".

    Raises:
        ConfigError: a key is missing, unknown or has an impossible value.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is no object", _FORMAT)
    unknown = next((key for key in value if key not in _KEYS), None)
    if unknown is not None:
        raise ConfigError(f"{place} has the unknown key {shown(unknown)}", f"use {listed(_KEYS)}")

    def require(key: str, fits: bool, wanted: str) -> None:
        if not fits:
            given = f"{key}={shown(value[key])}" if key in value else f"no {key}"
            raise ConfigError(f"{place} has {given}", f"give {wanted}; {_FORMAT}")

    ids: Any = value.get("token_ids")
    length: Any = value.get("prompt_length")
    logprobs: Any = value.get("logprobs")
    require("token_ids", _all_of(ids, lambda one: _is_integer(one, 0, _MAX_ID)), "token ids")
    most = len(ids) - 1
    require("prompt_length", _is_integer(length, 1, most), f"an integer from 1 to {most}")
    require("logprobs", _all_of(logprobs, _is_logprob), "finite numbers of fp32, none above 0")
    if len(logprobs) != len(ids) - length:
        raise ConfigError(
            f"{place} has {len(logprobs)} logprobs for {len(ids) - length} tokens of an answer",
            "give one for each of token_ids from prompt_length on",
        )
    temperature, version = value.get("temperature", 1.0), value.get("weight_version")
    low, high = _TEMPERATURES
    require("temperature", _is_number(temperature, low, high), f"a number from {low} to {high}")
    require("weight_version", version is None or _is_integer(version, 0, _MAX_VERSION), "a number")
    messages = value.get("messages")
    is_conversation = _all_of(messages, lambda message: isinstance(message, dict))
    require("messages", messages is None or is_conversation, "a list of objects")
    return ScoredRollout(
        name=shown(value["id"]) if "id" in value else name,
        token_ids=tuple(ids),
        prompt_len=length,
        logprobs=tuple(map(float, logprobs)),
        temperature=float(temperature),
        weight_version=version,
        messages=None if messages is None else tuple(messages),
    )


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix != ".json":
        yield from json_lines(path)
        return
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({in_words(error)})", _FORMAT) from error
    if not isinstance(values, list):
        raise ConfigError(f"{path} is no list", _FORMAT)
    yield from enumerate(values, 1)


def _scores(trainer: Trainer, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    return [float(score) for score in trainer((*prompt, *answer), len(prompt))]


def _version_of(output: RequestOutput) -> int | None:
    """The version of a rollout of one set of weights."""
    versions = output.weight_versions
    return versions[0] if versions and versions[0] == versions[1] else None


def _all_of(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and bool(values) and all(map(fits, values))


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _is_logprob(value: Any) -> bool:
    return _is_number(value, _MIN_LOGPROB, _MAX_LOGPROB)

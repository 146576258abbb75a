"""Benchmark workloads: the requests of an engine, the requests of a server, its address."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.bench.datasets import SPEC_BENCH, load_dataset, require_named
from sametoken.config import option
from sametoken.errors import ConfigError, RequestError
from sametoken.io.bearer import bearer
from sametoken.io.json_text import json_lines, parse_json
from sametoken.types.option_values import listed, require_least, require_limits
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams, derive_seed

# Random prompts leave out both ends of a large vocabulary, where special tokens are.
_EDGE = 1000

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with the same settings, which ignore the end-of-text token.

    Attributes:
        input_len, output_len: tokens per request; given prompts keep their length.
        concurrency: maximum numbers of running requests, one measurement each.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of random prompts and of sampling.
        prompts: token ids, used cyclically; random prompts if empty.

    Raises:
        ConfigError: a number is impossible.
    """

    input_len: int = 512
    output_len: int = 128
    concurrency: tuple[int, ...] = (1,)
    temperature: float = 0.0
    seed: int = 0
    prompts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        require_least(self, input_len=1, output_len=1)
        fewest = min(self.concurrency, default=0)
        if fewest < 1:
            raise ConfigError(f"concurrency={fewest} is not possible", "use at least 1")
        try:
            self.params(self.output_len)
        except RequestError as error:
            raise ConfigError(error.cause, error.remedy) from error

    def params(self, max_tokens: int, index: int = 0) -> SamplingParams:
        """How request ``index`` is sampled."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            ignore_eos=True,
            seed=derive_seed(self.seed, index),
            detokenize=False,
        )

    def require_slots(self, max_num_seqs: int) -> None:
        """Refuse more requests at once than an engine runs.

        Raises:
            ConfigError: the concurrency is higher.
        """
        most = max(self.concurrency)
        if most > max_num_seqs:
            raise ConfigError(
                f"concurrency {most} is above max_num_seqs={max_num_seqs}", "raise max_num_seqs"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(len, self.prompts), default=self.input_len) + self.output_len


#: Workloads by name. Other engines were measured with "peer": random token ids, greedy, no
#: prefix cache.
PRESETS = {"peer": Workload(input_len=512, output_len=256, concurrency=(1, 8, 64))}


class RequestSource:
    """Generates requests with distinct random prompts, ids and seeds.

    Args:
        workload: settings of the requests.
        vocab_size: the model's vocabulary size.
    """

    def __init__(self, workload: Workload, vocab_size: int) -> None:
        edge = _EDGE if vocab_size > 4 * _EDGE else 0
        self._workload = workload
        self._allowed = range(edge, vocab_size - edge)
        self._random = random.Random(workload.seed)
        self._num_made = 0

    def take(self, count: int, output_len: int | None = None) -> list[EngineRequest]:
        """Return the next ``count`` requests; ``output_len`` overrides the workload's."""
        return [self._next(output_len or self._workload.output_len) for _ in range(count)]

    def _next(self, output_len: int) -> EngineRequest:
        workload, index = self._workload, self._num_made
        self._num_made += 1
        if workload.prompts:
            prompt = workload.prompts[index % len(workload.prompts)]
        else:
            prompt = tuple(self._random.choices(self._allowed, k=workload.input_len))
        params = workload.params(output_len, index)
        return EngineRequest(f"bench-{index}", prompt, params, len(prompt) + output_len)


def read_prompts(path: Path, encode: Encode, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Read prompts from a file with one JSON value per line.

    Args:
        path: each line is a string, a list of token ids, or an object with ``prompt`` or
            ``prompt_token_ids``.
        encode: text to token ids.
        vocab_size: ids must be below it.

    Raises:
        ConfigError: the file cannot be read or a line is invalid.
    """
    prompts = []
    for number, value in json_lines(path):
        place = f"line {number} of {path}"
        token_ids = _token_ids(value, place, encode)
        if max(token_ids) >= vocab_size:
            raise ConfigError(
                f"{place} holds token id {max(token_ids)}, which is not in the vocabulary",
                f"use ids from 0 to {vocab_size - 1}",
            )
        prompts.append(token_ids)
    if not prompts:
        raise ConfigError(f"{path} holds no prompts", "give one JSON value a line")
    return tuple(prompts)


def _token_ids(value: Any, place: str, encode: Encode) -> tuple[int, ...]:
    if isinstance(value, dict):
        ids = value.get("prompt_token_ids")
        value = value.get("prompt", None if isinstance(ids, str) else ids)
    if isinstance(value, str):
        value = list(encode(value))
    is_ids = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
    if not is_ids or not value:
        raise ConfigError(f"{place} is no prompt", "give a text or a list of token ids")
    return tuple(value)


CHAT, COMPLETIONS, AUTO = "chat", "completions", "auto"
APIS = (AUTO, COMPLETIONS, CHAT)
#: Datasets of questions, which are sent to the chat endpoint by default.
_CHAT_DATASETS = ("gsm8k", "humaneval", "mt-bench", SPEC_BENCH)


@dataclass(frozen=True, slots=True)
class ServingWorkload:
    """Requests to a server; a dataset with fewer items is repeated.

    Raises:
        ConfigError: a value is impossible.
    """

    dataset: str = option(
        "mt-bench", "gsm8k, humaneval, mt-bench, random, spec-bench or custom", "--dataset-name"
    )
    path: Path | None = option(None, "file of the dataset spec-bench or custom", "--dataset-path")
    num_prompts: int = option(100, "number of requests per run")
    input_len: int = option(64, "random: number of words per prompt")
    output_len: int = option(128, "maximum number of tokens per answer")
    temperature: float = option(0.0, "sampling temperature; 0 is greedy")
    seed: int = option(0, "seed of sampling and of the requests' arrival times")
    api: str = option(AUTO, "completions or chat; auto: chat for datasets of questions")
    ignore_eos: bool = option(False, "request answers of the full length")
    warmup: int = option(1, "number of uncounted requests before each load", "--num-warmups")
    repeats: int = option(1, "number of runs per load, which shows the spread")
    trace: int = option(1, "number of requests sent again, one at a time, to record their tokens")

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} is not possible", "use 0 or more")
        require_least(self, num_prompts=1, input_len=1, output_len=1, repeats=1, warmup=0, trace=0)
        require_named(self.dataset, self.path)
        if self.api not in APIS:
            raise ConfigError(f"api {self.api!r} is not known", f"use {listed(APIS)}")

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as chat messages."""
        if self.api == AUTO:
            return self.dataset in _CHAT_DATASETS
        return self.api == CHAT

    def prompts(self) -> list[str]:
        """Return the prompt texts of a run: the first turn of each item.

        Raises:
            ConfigError: as ``load_dataset``.
        """
        items = load_dataset(
            self.dataset,
            path=self.path,
            limit=self.num_prompts,
            seed=self.seed,
            input_len=self.input_len,
        )
        return [items[i % len(items)].turns[0] for i in range(self.num_prompts)]


@dataclass(frozen=True, slots=True)
class Server:
    """The address and request options of a server.

    Raises:
        ConfigError: the address, the key or the timeout is invalid, or the extra fields are no JSON
            object.
    """

    url: str = option(
        "http://127.0.0.1:8000", "address of the server, with or without /v1", "--base-url"
    )
    model: str | None = option(None, "served model name [default: the first one]")
    api_key: str | None = option(None, "API key, sent as a bearer token")
    timeout: float = option(
        600.0, "seconds without data after which a request fails", limits=(0.001, 86400.0)
    )
    extra_body: str = option("{}", "JSON object with further fields for every request")

    def __post_init__(self) -> None:
        require_limits(self)
        object.__setattr__(self, "url", server_root(self.url))
        bearer(self.api_key)
        try:
            is_object = isinstance(parse_json(self.extra_body), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ConfigError(f"extra_body={self.extra_body!r} is no JSON object", "give {...}")

    @property
    def extra(self) -> dict[str, Any]:
        """Further fields of every request's body."""
        return dict(parse_json(self.extra_body))


def server_root(url: str) -> str:
    """The address of a server without a trailing ``/v1`` or slash.

    Raises:
        ConfigError: it is no address.
    """
    if not re.match(r"https?://[^/]", url):
        raise ConfigError(f"{url!r} is no address", "give http://host:port")
    return url.rstrip("/").removesuffix("/v1")

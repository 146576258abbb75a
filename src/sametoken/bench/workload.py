"""What is asked of the engine while it is measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.core.json_text import json_lines
from sametoken.core.request import EngineRequest
from sametoken.core.sampling_params import SamplingParams
from sametoken.core.seeds import derive_seed
from sametoken.errors import ConfigError

# Random prompts keep away from both ends of a large vocabulary, where special tokens are.
_EDGE = 1000

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind. All run to their full length: no token ends them.

    Attributes:
        input_len, output_len: tokens per request; prompts that are given keep their length.
        concurrency: requests that run at once, one measurement each.
        temperature: of sampling; 0 is greedy.
        seed: of random prompts and of sampling.
        prompts: token ids, used in turn; random ones if there are none.

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
        numbers = {"input_len": self.input_len, "output_len": self.output_len}
        numbers |= {"concurrency": min(self.concurrency, default=0)}
        for name, value in numbers.items():
            if value < 1:
                raise ConfigError(f"{name}={value} is not possible", "use at least 1")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(len, self.prompts), default=self.input_len) + self.output_len


#: Workloads by name. "peer" is what other engines were measured with: random token ids,
#: greedy, no prefix cache.
PRESETS = {"peer": Workload(input_len=512, output_len=256, concurrency=(1, 8, 64))}


class RequestSource:
    """Makes requests; no two have the same random prompt, id or seed.

    Args:
        workload: what they are like.
        vocab_size: the model's.
    """

    def __init__(self, workload: Workload, vocab_size: int) -> None:
        edge = _EDGE if vocab_size > 4 * _EDGE else 0
        self._workload = workload
        self._allowed = range(edge, vocab_size - edge)
        self._random = random.Random(workload.seed)
        self._num_made = 0

    def take(self, count: int, output_len: int | None = None) -> list[EngineRequest]:
        """The next ``count`` requests; ``output_len`` in place of the workload's if given."""
        return [self._next(output_len or self._workload.output_len) for _ in range(count)]

    def _next(self, output_len: int) -> EngineRequest:
        workload, index = self._workload, self._num_made
        self._num_made += 1
        if workload.prompts:
            prompt = workload.prompts[index % len(workload.prompts)]
        else:
            prompt = tuple(self._random.choices(self._allowed, k=workload.input_len))
        params = SamplingParams(
            temperature=workload.temperature,
            max_tokens=output_len,
            ignore_eos=True,
            seed=derive_seed(workload.seed, index),
            detokenize=False,
        )
        return EngineRequest(f"bench-{index}", prompt, params, len(prompt) + output_len)


def read_prompts(path: Path, encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Prompts of a file with one JSON value a line.

    Args:
        path: lines of a text, a list of token ids, or an object with ``prompt`` or
            ``prompt_token_ids``.
        encode: text to token ids.

    Raises:
        ConfigError: the file cannot be read or a line is none of these.
    """
    prompts = tuple(_token_ids(value, path, number, encode) for number, value in json_lines(path))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts", "give one JSON value a line")
    return prompts


def _token_ids(value: Any, path: Path, number: int, encode: Encode) -> tuple[int, ...]:
    if isinstance(value, dict):
        ids = value.get("prompt_token_ids")
        value = value.get("prompt", None if isinstance(ids, str) else ids)
    if isinstance(value, str):
        value = list(encode(value))
    is_ids = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
    if not is_ids or not value:
        raise ConfigError(
            f"line {number} of {path} is no prompt", "give a text or a list of token ids"
        )
    return tuple(value)

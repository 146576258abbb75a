"""What a server is asked under load, and where it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.bench.datasets import SPEC_BENCH, load_dataset
from sametoken.config import option
from sametoken.core.json_text import parse_json
from sametoken.errors import ConfigError

CHAT, COMPLETIONS, AUTO = "chat", "completions", "auto"
APIS = (AUTO, COMPLETIONS, CHAT)
#: Datasets of questions, which chat models answer as such.
_ASKED_IN_CHAT = ("gsm8k", "humaneval", "mt-bench", SPEC_BENCH)
_LEAST = {"num_prompts": 1, "input_len": 1, "output_len": 1, "repeats": 1, "warmup": 0, "trace": 0}


@dataclass(frozen=True, slots=True)
class ServingWorkload:
    """What a server is asked; a dataset smaller than the number of requests is used again.

    Raises:
        ConfigError: a value is impossible.
    """

    dataset: str = option("mt-bench", "gsm8k, humaneval, mt-bench, random, spec-bench or custom")
    path: Path | None = option(None, "file of spec-bench or custom")
    num_prompts: int = option(100, "requests of a run")
    input_len: int = option(64, "random: words of a prompt")
    output_len: int = option(128, "most tokens of an answer")
    temperature: float = option(0.0, "0 takes the most likely token")
    seed: int = option(0, "of sampling, and of the times at which requests come")
    api: str = option(AUTO, "completions or chat; auto: chat for sets of questions")
    ignore_eos: bool = option(False, "ask for answers of the full length")
    warmup: int = option(1, "requests before each load that are not counted")
    repeats: int = option(1, "runs of each load, for the spread")
    trace: int = option(1, "requests whose tokens are kept; they are asked again, alone")

    def __post_init__(self) -> None:
        for name, minimum in _LEAST.items():
            if getattr(self, name) < minimum:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not possible", f"use at least {minimum}"
                )
        if self.api not in APIS:
            raise ConfigError(f"api {self.api!r} is not known", f"use one of {APIS}")

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as messages."""
        if self.api == AUTO:
            return self.dataset in _ASKED_IN_CHAT
        return self.api == CHAT

    def prompts(self) -> list[str]:
        """The texts of a run's requests: the first turn of each item.

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
    """A server and how it is spoken to.

    Raises:
        ConfigError: the address is none, or the extra fields are no JSON object.
    """

    url: str = option("http://127.0.0.1:8000", "where the server is, with or without /v1")
    model: str | None = option(None, "name for requests [default: the first that is served]")
    api_key: str | None = option(None, "sent as a bearer token")
    timeout: float = option(600.0, "seconds without news after which a request has failed")
    extra_body: str = option("{}", "JSON object: more fields of every request")

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(f"{self.url!r} is no address", "give http://host:port")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))
        try:
            is_object = isinstance(parse_json(self.extra_body), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ConfigError(f"extra_body={self.extra_body!r} is no JSON object", "give {...}")

    @property
    def extra(self) -> dict[str, Any]:
        """More fields of every request's body."""
        return dict(parse_json(self.extra_body))

"""Options: each defined once here, and from here fed to Python, CLI help and docs."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sametoken.errors import ConfigError

METHODS = ("ngram", "draft_model", "eagle", "eagle3")
MAX_SPECULATIVE_TOKENS = 64
DEFAULT_MODEL = "smollm2"


def option(default: Any, text: str) -> Any:
    """A dataclass field whose help text serves the CLI and the docs."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made; keys as vLLM's ``--speculative-config`` has them.

    Raises:
        ConfigError: a value is impossible or a key that the method needs is missing.
    """

    method: str = option("", "ngram, draft_model, eagle3 or eagle")
    num_speculative_tokens: int = option(0, "drafts per step at most, 1..64")
    model: str | None = option(None, "checkpoint of the drafter, for methods that load one")
    prompt_lookup_max: int = option(5, "ngram: longest suffix to match, in tokens")
    prompt_lookup_min: int = option(1, "ngram: shortest suffix to match, in tokens")

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative method {self.method!r} is not known", f"use one of {METHODS}"
            )
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens} is not possible",
                f"use an integer from 1 to {MAX_SPECULATIVE_TOKENS}",
            )
        if self.method != "ngram" and not self.model:
            raise ConfigError(f"method {self.method!r} needs a drafter", 'set "model"')
        if self.method == "ngram" and self.model:
            raise ConfigError("method 'ngram' loads no drafter", 'leave "model" out')
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} and "
                f"prompt_lookup_max={self.prompt_lookup_max} leave nothing to match",
                "use 1 <= min <= max",
            )

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """From a JSON text, a mapping, or an instance.

        Raises:
            ConfigError: malformed JSON, an unknown key, or a value of the wrong type.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            value = _json_object(value)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key, given in value.items():
            if key not in fields:
                raise ConfigError(f"unknown key {key!r} in speculative config", _hint(key, fields))
            wanted = int if fields[key].type == "int" else str
            if not isinstance(given, wanted) or isinstance(given, bool):
                raise ConfigError(
                    f"speculative config: {key}={given!r} is of the wrong type",
                    f"give a value of type {wanted.__name__}",
                )
        return cls(**value)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user asks of the engine. "auto" and None are resolved once, at start-up.

    Raises:
        ConfigError: a value is impossible on its face.
    """

    model: str = option(DEFAULT_MODEL, "checkpoint directory, GGUF file, or smollm2")
    tokenizer: str | None = option(None, "tokenizer directory or file; default: the model's")
    skip_tokenizer_init: bool = option(False, "load no tokenizer; prompts are token ids")
    dtype: str = option("auto", "auto, bfloat16 or float32")
    device: str = option("auto", "auto, cpu or cuda")
    seed: int = option(0, "seed from which requests without one draw theirs")
    max_model_len: int | None = option(None, "longest prompt + output, in tokens")
    max_num_seqs: int = option(64, "requests that run at once")
    max_num_batched_tokens: int = option(2048, "rows of one step at most")
    prefill_chunk_size: int = option(256, "grid of prefill chunks, in tokens from position 0")
    block_size: int = option(16, "tokens per KV block")
    kv_cache_memory_bytes: int | None = option(None, "KV memory; default 1 GiB on a CPU")
    num_kv_blocks: int | None = option(None, "KV blocks, overriding kv_cache_memory_bytes")
    enable_prefix_caching: bool = option(True, "share KV of equal prompt blocks")
    steps_in_flight: int = option(0, "steps enqueued ahead of the host, 1..3; 0: by device")
    enforce_eager: bool = option(False, "use no CUDA graphs")
    load_format: str = option("auto", "auto, safetensors or gguf")
    speculative_config: SpeculativeConfig | None = option(None, "JSON: how drafts are made")

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not possible", f"use one of {allowed}"
                )
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(
                    f"{name}={value!r} is not possible", f"use an integer from {low} to {high}"
                )
        if self.prefill_chunk_size % self.block_size:
            raise ConfigError(
                f"prefill_chunk_size={self.prefill_chunk_size} is not a multiple of "
                f"block_size={self.block_size}",
                "choose a multiple",
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """From keyword arguments as ``LLM`` takes them.

        Raises:
            ConfigError: an option is unknown or impossible.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for name in options:
            if name not in fields:
                raise ConfigError(f"unknown option {name!r}", _hint(name, fields))
        if options.get("speculative_config") is not None:
            options["speculative_config"] = SpeculativeConfig.parse(options["speculative_config"])
        return cls(**options)


_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "bfloat16", "float32"),
    "device": ("auto", "cpu", "cuda"),
    "load_format": ("auto", "safetensors", "gguf"),
}
_OPTIONAL = ("max_model_len", "kv_cache_memory_bytes", "num_kv_blocks")
_LIMITS = (
    ("seed", 0, 2**63 - 1),
    ("max_model_len", 1, 2**31),
    ("max_num_seqs", 1, 4096),
    ("max_num_batched_tokens", 1, 2**20),
    ("prefill_chunk_size", 1, 2**16),
    ("block_size", 1, 1024),
    ("kv_cache_memory_bytes", 1, 2**50),
    ("num_kv_blocks", 1, 2**31),
    ("steps_in_flight", 0, 3),
)


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"speculative config is not JSON: {error.msg} at column {error.colno}",
            'give an object such as {"method": "ngram", "num_speculative_tokens": 5}',
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("speculative config is not a JSON object", "wrap it in braces")
    return value


def _hint(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"

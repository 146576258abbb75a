"""Options of the engine and of speculation: the single definition for Python, CLI and docs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sametoken.errors import ConfigError, shown
from sametoken.types.option_values import (
    CASCADED,
    HEADS,
    KEYED,
    LOOKUPS,
    SYNTHETIC,
    check_acceptance,
    check_lookups,
    json_object,
    require_files,
    require_path,
    require_types,
    suggestion,
    typed,
)

EXTRACT = "extract_hidden_states"
METHODS = (*LOOKUPS, *CASCADED, EXTRACT)
# Methods without a drafter checkpoint.
WITHOUT_MODEL = (*LOOKUPS, "mtp", EXTRACT)
# Methods with a built-in drafter for some targets, where "model" is optional.
_SHIPPED = ("eagle3",)
# vLLM's former, model-specific names of "mtp".
METHOD_ALIASES = dict.fromkeys(("qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp"), "mtp")
# Quantizations of draft heads.
QUANTIZATIONS = ("fp8",)
MAX_SPECULATIVE_TOKENS = 64
MAX_MTP_TOKENS = 8
# Each further token costs one more pass over the matches.
MAX_LOOKUP_TOKENS = 1024
# Ranges of num_speculative_tokens other than 1..64. Extraction proposes no drafts, but vLLM
# requires the value 1.
_NUM_TOKENS = {"mtp": (1, MAX_MTP_TOKENS), EXTRACT: (0, 1)}
ADAPTIVE, FIXED = "adaptive", "fixed"
DUMMY = "dummy"
DEFAULT_MODEL = "smollm2"
MODEL_HELP = (
    "checkpoint directory, GGUF file, Hugging Face hub id as org/name[@revision], smollm2, "
    "or in a checkout hybrid-28m"
)


def option(default: Any, text: str, *spellings: str) -> Any:
    """A dataclass field with a help text for the CLI and the docs.

    Args:
        default: the field's default.
        text: the help text.
        spellings: flags beside the field's own name on the command line.
    """
    return field(default=default, metadata={"help": text, "spellings": spellings})


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding options, with the keys of vLLM's ``--speculative-config``.

    Raises:
        ConfigError: a value is impossible or a key that the method needs is missing.
    """

    method: str = option(
        "", "ngram, suffix, draft_model, eagle3, eagle, mtp or extract_hidden_states"
    )
    num_speculative_tokens: int = option(0, "drafts per step at most, 1..64; mtp: 1..8")
    model: str | None = option(
        None,
        "the drafter's checkpoint or hub id, or smollm2-eagle3; "
        "eagle3 may leave it out with smollm2",
    )
    prompt_lookup_max: int = option(5, "ngram: longest suffix to match, in tokens, <= 1024")
    prompt_lookup_min: int = option(1, "ngram: shortest suffix to match, in tokens")
    suffix_decoding_max_tree_depth: int = option(24, "suffix: longest match, in tokens")
    suffix_decoding_max_cached_requests: int = option(
        0, "suffix: earlier requests whose text is matched too, as far as 256 MiB hold them"
    )
    suffix_decoding_max_spec_factor: float = option(1.0, "suffix: drafts for a matched token")
    suffix_decoding_min_token_prob: float = option(0.1, "suffix: share of matches to agree, 0..1")
    quantization: str | None = option(
        None, "eagle, eagle3 or mtp on a GPU: fp8 keeps the head's matrices as float8 e4m3"
    )
    token_map: str | None = option(
        None, "eagle, eagle3 or mtp: JSON list of the only tokens that the head may propose"
    )
    cascade: str | None = option(
        None, "ngram or suffix: drafts first where it matches; the method does elsewhere"
    )
    cascade_min_match: int = option(4, "cascade: shortest match that goes first, in tokens")
    cascade_model_tokens: int | None = option(None, "cascade: drafts of the method itself, <= k")
    rejection_sample_method: str = option(
        KEYED, "keyed; or synthetic, which accepts drafts by chance, to measure times alone"
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None, "synthetic: how often draft i and all before it are accepted; 0 from its end on"
    )
    synthetic_acceptance_length: float | None = option(
        None, "synthetic: mean tokens per step instead, the target's own counted, 1..k+1"
    )
    draft_limits: str = option(
        ADAPTIVE,
        "adaptive: a request's draft limit follows its matches, its acceptance and the load; "
        "fixed: always num_speculative_tokens",
    )
    shared_storage_path: str | None = option(
        None, "extract_hidden_states: directory for the shards and their manifest"
    )
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = option(
        None,
        "extract_hidden_states: layers whose inputs are kept, 0..n; "
        "default 2, n // 2 and n - 3, as EAGLE-3 reads them",
    )

    @property
    def proposes(self) -> bool:
        """Whether the method proposes drafts; only extraction does not."""
        return self.method != EXTRACT and self.num_speculative_tokens > 0

    @property
    def label(self) -> str:
        """The method for people and metrics; a cascade with the lookup that goes first."""
        return f"cascade ({self.cascade}, then {self.method})" if self.cascade else self.method

    @property
    def num_model_tokens(self) -> int:
        """Maximum drafts of the method's own drafter; a cascade's lookup may propose more."""
        own = self.cascade_model_tokens
        return self.num_speculative_tokens if own is None else own

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """Probabilities that draft i and all before it are accepted; None for keyed sampling.

        An acceptance length fills the first drafts: 2.6 gives rates 1, 0.6, 0, ...
        """
        k = self.num_speculative_tokens
        if self.synthetic_acceptance_rates is not None:
            given = tuple(map(float, self.synthetic_acceptance_rates))
            return given + (0.0,) * (k - len(given))
        if self.synthetic_acceptance_length is None:
            return None
        drafts = self.synthetic_acceptance_length - 1
        return tuple(min(max(drafts - i, 0.0), 1.0) for i in range(k))

    def __post_init__(self) -> None:
        require_types(self, _SPECULATIVE)
        for name in ("model", "token_map", "shared_storage_path"):
            require_path(_SPECULATIVE + name, getattr(self, name))
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative method {shown(self.method)} is not known", f"use one of {METHODS}"
            )
        least, most = _NUM_TOKENS.get(self.method, (1, MAX_SPECULATIVE_TOKENS))
        if not least <= self.num_model_tokens <= most:
            raise ConfigError(
                f"num_speculative_tokens={shown(self.num_model_tokens)} is not possible with "
                f"method {self.method!r}",
                f"use an integer from {least} to {most}",
            )
        if self.method not in (*WITHOUT_MODEL, *_SHIPPED) and not self.model:
            raise ConfigError(f"method {self.method!r} needs a drafter", 'set "model"')
        if self.method in WITHOUT_MODEL and self.model:
            raise ConfigError(
                f"method {self.method!r} loads no drafter of its own", 'leave "model" out'
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP_TOKENS:
            raise ConfigError(
                f"prompt_lookup_min={shown(self.prompt_lookup_min)} and "
                f"prompt_lookup_max={shown(self.prompt_lookup_max)} leave nothing to match",
                f"use 1 <= min <= max <= {MAX_LOOKUP_TOKENS}",
            )
        if self.draft_limits not in (ADAPTIVE, FIXED):
            raise ConfigError(
                f"draft_limits={shown(self.draft_limits)} is not possible",
                f"use {ADAPTIVE!r} or {FIXED!r}",
            )
        _check_head_options(self)
        check_lookups(self, MAX_SPECULATIVE_TOKENS)
        _check_extraction(self)
        check_acceptance(self)

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Parse JSON text, a mapping, or an instance; accepts vLLM's older method names.

        Raises:
            ConfigError: malformed JSON, an unknown key, or a value of the wrong type.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            value = json_object(value)
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"speculative_config={shown(value)} is not possible", "give a mapping or its JSON"
            )
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in value:
            if key not in fields:
                raise ConfigError(
                    f"unknown key {shown(key)} in speculative config", suggestion(str(key), fields)
                )
        given = {
            key: typed(_SPECULATIVE + key, fields[key].type, one) for key, one in value.items()
        }
        method = given.get("method", "")
        if method == "suffix" and "num_speculative_tokens" not in given:
            depth = fields["suffix_decoding_max_tree_depth"]
            given["num_speculative_tokens"] = given.get(depth.name, depth.default)
        return cls(**given | {"method": METHOD_ALIASES.get(method, method)})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The user's engine options. "auto" and None are resolved once, at start-up.

    Raises:
        ConfigError: a value is impossible.
    """

    model: str = option(DEFAULT_MODEL, MODEL_HELP)
    tokenizer: str | None = option(
        None, "tokenizer directory, file or hub id; default: the model's"
    )
    chat_template: str | None = option(None, "Jinja file that replaces the model's chat template")
    generation_config: str = option(
        "auto",
        "default sampling parameters: auto, of the model's generation_config.json; vllm, of no "
        "file; or a directory with that file",
    )
    skip_tokenizer_init: bool = option(False, "load no tokenizer; prompts are token ids")
    dtype: str = option("auto", "auto, bfloat16 or float32")
    device: str = option("auto", "auto, cpu or cuda")
    seed: int = option(0, "seed from which requests without one draw theirs")
    max_model_len: int | None = option(None, "longest prompt + output, in tokens")
    max_num_seqs: int = option(0, "requests that run at once; 0: 64 on a CPU, 256 on a GPU")
    max_num_batched_tokens: int = option(
        0, "maximum rows per step, drafts included; 0: 2048 on a CPU, 4096 on a GPU"
    )
    prefill_chunk_size: int = option(
        0, "maximum tokens of one prompt per step; 0: max_num_batched_tokens"
    )
    block_size: int = option(0, "tokens per KV block; 0: 16 on a CPU, 64 on a GPU")
    kv_cache_memory_bytes: int | None = option(
        None, "KV memory; default 1 GiB on a CPU, what gpu_memory_utilization leaves on a GPU"
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory to use in all")
    num_kv_blocks: int | None = option(
        None, "KV blocks, overriding kv_cache_memory_bytes", "--num-gpu-blocks-override"
    )
    enable_prefix_caching: bool = option(True, "share KV of equal prompt blocks")
    steps_in_flight: int = option(
        0, "steps enqueued ahead of the host, 1..3; 0: 1 on a CPU, 2 on a GPU"
    )
    enforce_eager: bool = option(False, "use no CUDA graphs")
    tensor_parallel_size: int = option(
        1, "ranks that share the model, each with a shard of every layer and its own GPU", "-tp"
    )
    load_format: str = option(
        "auto", "auto, safetensors, gguf, or dummy: random weights, to measure times"
    )
    speculative_config: SpeculativeConfig | None = option(None, "JSON: how drafts are made")

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        require_types(self)
        for name in _PATHS:
            require_path(name, getattr(self, name))
        if self.speculative_config is not None:
            speculative = SpeculativeConfig.parse(self.speculative_config)
            object.__setattr__(self, "speculative_config", speculative)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={shown(self.gpu_memory_utilization)} is not possible",
                "use a number above 0 and up to 1",
            )
        require_files(self.chat_template, self.generation_config)

    def _check_choices(self) -> None:
        for name in _PATHS:
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}={shown(getattr(self, name))} is not possible", f"use one of {allowed}"
                )

    def _check_numbers(self) -> None:
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(
                    f"{name}={shown(value)} is not possible",
                    f"use an integer from {low} to {high}",
                )

    @property
    def synthetic(self) -> tuple[str, ...]:
        """Labels of the synthetic parts, to show beside every result; empty if there are none."""
        speculative = self.speculative_config
        parts = {
            "dummy weights": self.load_format == DUMMY,
            "synthetic acceptance": speculative is not None
            and speculative.synthetic_rates is not None,
        }
        return tuple(part for part, is_synthetic in parts.items() if is_synthetic)

    @property
    def num_speculative_tokens(self) -> int:
        """k: maximum drafts per step; 0 without speculation."""
        speculative = self.speculative_config
        return speculative.num_speculative_tokens if speculative and speculative.proposes else 0

    @property
    def draft_load_format(self) -> str:
        """``load_format`` of the drafter: dummy if the target's is, else "auto"."""
        return DUMMY if self.load_format == DUMMY else "auto"

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from the keyword arguments of ``LLM``.

        Raises:
            ConfigError: an option is unknown or impossible.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for name in options:
            if name not in fields:
                raise ConfigError(f"unknown option {name!r}", suggestion(name, fields))
        return cls(**options)


# Prefix of a key's name in an error.
_SPECULATIVE = "speculative config: "
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "bfloat16", "float32"),
    "device": ("auto", "cpu", "cuda"),
    "load_format": ("auto", "safetensors", "gguf", DUMMY),
}
_PATHS = ("model", "tokenizer", "chat_template", "generation_config")
_OPTIONAL = ("max_model_len", "kv_cache_memory_bytes", "num_kv_blocks")
_LIMITS = (
    ("seed", 0, 2**63 - 1),
    ("max_model_len", 1, 2**31),
    ("max_num_seqs", 0, 4096),
    ("max_num_batched_tokens", 0, 2**20),
    ("prefill_chunk_size", 0, 2**20),
    ("block_size", 0, 1024),
    ("kv_cache_memory_bytes", 1, 2**50),
    ("num_kv_blocks", 1, 2**31),
    ("steps_in_flight", 0, 3),
    ("tensor_parallel_size", 1, 64),
)


def _check_head_options(config: SpeculativeConfig) -> None:
    for name in ("quantization", "token_map"):
        if getattr(config, name) is not None and config.method not in HEADS:
            raise ConfigError(
                f"method {config.method!r} takes no {name}: it has no draft head",
                f'leave "{name}" out, or use one of {HEADS}',
            )
    if config.quantization not in (None, *QUANTIZATIONS):
        raise ConfigError(
            f"quantization {shown(config.quantization)} is not known", f"use one of {QUANTIZATIONS}"
        )


def _check_extraction(config: SpeculativeConfig) -> None:
    layers = config.eagle_aux_hidden_state_layer_ids
    if config.method != EXTRACT:
        for name in ("shared_storage_path", "eagle_aux_hidden_state_layer_ids"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"method {config.method!r} takes no {name}", f"it belongs to {EXTRACT!r}"
                )
        return
    if not config.shared_storage_path:
        raise ConfigError(
            f"method {EXTRACT!r} needs a directory to write to", 'set "shared_storage_path"'
        )
    if layers is not None and not (
        layers and all(isinstance(i, int) and 0 <= i < 2**31 for i in layers)
    ):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids={shown(layers)} are no layers",
            "give a list of integers from 0 on",
        )
    if config.rejection_sample_method == SYNTHETIC:
        raise ConfigError(
            f"method {EXTRACT!r} with synthetic acceptance would record tokens that are made up",
            "leave rejection_sample_method out",
        )

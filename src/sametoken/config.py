"""Options of the engine and of speculation: the single definition for Python, CLI and docs."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from sametoken.errors import ConfigError, shown
from sametoken.types.lora_modules import LoRAModule, parse_modules
from sametoken.types.option_values import (
    option,
    require_choices,
    require_files,
    require_limits,
    require_path,
    require_types,
    suggestion,
)
from sametoken.types.speculative_config import SpeculativeConfig
from sametoken.types.speculative_methods import HEADS, WITHOUT_MODEL

__all__ = [
    "DEFAULT_MODEL",
    "DUMMY",
    "MODEL_HELP",
    "PROCESSED_LOGPROBS",
    "RAW_LOGPROBS",
    "EngineConfig",
    "SpeculativeConfig",
    "option",
]

DUMMY = "dummy"
RAW_LOGPROBS, PROCESSED_LOGPROBS = "raw_logprobs", "processed_logprobs"
DEFAULT_MODEL = "smollm2"
MODEL_HELP = (
    "checkpoint directory, GGUF file, Hugging Face hub id as org/name[@revision], smollm2, "
    "or in a checkout hybrid-28m or nemotron-h-31m"
)


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
        "file; or a directory with that file, whose max_new_tokens limits requests to a server too",
    )
    skip_tokenizer_init: bool = option(False, "load no tokenizer; prompts are token ids")
    dtype: str = option(
        "auto", "dtype of weights and activations", choices=("auto", "bfloat16", "float32")
    )
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    seed: int = option(0, "seed from which requests without one draw theirs", limits=(0, 2**63 - 1))
    max_model_len: int | None = option(
        None, "longest prompt + output, in tokens", limits=(2, 2**31)
    )
    max_num_seqs: int = option(
        0, "requests that run at once; 0: 64 on a CPU, 256 on a GPU", limits=(0, 4096)
    )
    max_num_batched_tokens: int = option(
        0,
        "maximum rows per step, drafts included; 0: 2048 on a CPU, 8192 on a GPU",
        limits=(0, 2**20),
    )
    prefill_chunk_size: int = option(
        0, "maximum tokens of one prompt per step; 0: max_num_batched_tokens", limits=(0, 2**20)
    )
    fast_prompts_from: int = option(
        0,
        "tokens from which prompts run in a faster form of their own, with other low-order bits: "
        "latent attention (MLA) expanded, faster from 8,192 on, recurrent layers (Gated DeltaNet, "
        "Mamba-2) in chunks of 64 positions, from 512 on; 0: none does",
        limits=(0, 2**31),
    )
    block_size: int = option(
        0, "tokens per KV block; 0: 16 on a CPU, 64 on a GPU", limits=(0, 1024)
    )
    kv_cache_dtype: str = option(
        "auto",
        "dtype of keys and values in memory: fp8 is fp8_e4m3, half the bytes of 16 bits and other "
        "tokens; auto: fp8 where the checkpoint has a kv_cache_scheme, else the model's",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "KV memory; default 1 GiB on a CPU, what gpu_memory_utilization leaves on a GPU",
        limits=(1, 2**50),
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory to use in all")
    num_kv_blocks: int | None = option(
        None,
        "KV blocks, overriding kv_cache_memory_bytes",
        "--num-gpu-blocks-override",
        limits=(1, 2**31),
    )
    enable_prefix_caching: bool = option(
        True, "share KV, and recurrent states, of equal beginnings of requests"
    )
    kept_states_memory_bytes: int | None = option(
        None,
        "part of the KV memory for recurrent states kept for prefix caching; default: an eighth",
        limits=(0, 2**50),
    )
    swap_space: float = option(
        4.0, "host memory for KV of preempted requests, in GiB per rank", limits=(0, 2**20)
    )
    kv_offloading_size: float = option(
        0.0,
        "host memory for KV that leaves the prefix cache, in GiB per rank",
        limits=(0, 2**20),
    )
    swap_dir: str | None = option(
        None, "directory of a file for swapped KV, when host memory is short; default: none"
    )
    swap_dir_size: float = option(
        16.0, "maximum size of the file in swap_dir, in GiB", limits=(0, 2**20)
    )
    steps_in_flight: int = option(
        0, "steps enqueued ahead of the host, 1..3; 0: 1 on a CPU, 2 on a GPU", limits=(0, 3)
    )
    enforce_eager: bool = option(False, "use no CUDA graphs")
    tensor_parallel_size: int = option(
        1,
        "ranks that share the model, each with a shard of every layer and its own GPU",
        "-tp",
        limits=(1, 64),
    )
    disable_custom_all_reduce: bool = option(
        False,
        "NCCL copies between ranks, also where kernels could write into another GPU's memory; "
        "the same bits",
    )
    logprobs_mode: str = option(
        RAW_LOGPROBS,
        "log-probabilities of output tokens: raw_logprobs of the model, or processed_logprobs of "
        "what tokens are chosen from, after penalties, masks, temperature and truncation",
        choices=(RAW_LOGPROBS, PROCESSED_LOGPROBS),
    )
    enable_return_routed_experts: bool = option(
        False, "return the experts that computed each token of a finished request"
    )
    load_format: str = option(
        "auto",
        "format of the checkpoint; gguf-packed: a GGUF file whose matrices stay in their bits; "
        "dummy: random weights, to measure times",
        choices=("auto", "safetensors", "gguf", "gguf-packed", DUMMY),
    )
    lora_modules: tuple[LoRAModule, ...] = option(
        (), "LoRA adapters that requests may choose, each as NAME=PATH; may be repeated"
    )
    enable_lora: bool = option(False, "let LoRA adapters come and go while the engine runs")
    max_loras: int = option(
        1,
        "with enable_lora, adapters that are there at once, those of lora_modules at least",
        limits=(1, 4096),
    )
    max_lora_rank: int = option(
        16, "with enable_lora, the largest rank of an adapter that comes", limits=(1, 512)
    )
    lora_experts: bool = option(
        False, "with enable_lora, adapters that come may change experts, which takes much memory"
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        "how drafts are made: a method's name, JSON whose keys sametoken help speculative lists, "
        "or null for none",
    )

    def __post_init__(self) -> None:
        self._check_choices()
        require_types(self)
        require_limits(self)
        for name in _PATHS:
            require_path(name, getattr(self, name))
        object.__setattr__(self, "lora_modules", parse_modules(self.lora_modules))
        object.__setattr__(self, "speculative_config", _speculation(self.speculative_config))
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
        require_choices(self)

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
    def result_settings(self) -> dict[str, Any]:
        """Options that results depend on, as JSON values; no drafter is among them."""
        settings = {name: getattr(self, name) for name in _OF_RESULTS}
        adapters = [list(one) for one in self.lora_modules]
        return settings | {"lora_modules": adapters, "synthetic": list(self.synthetic)}

    @property
    def num_speculative_tokens(self) -> int:
        """k: maximum drafts per step; 0 without speculation."""
        speculative = self.speculative_config
        return speculative.num_speculative_tokens if speculative and speculative.proposes else 0

    @property
    def draft_load_format(self) -> str:
        """``load_format`` of the drafter: the target's if it holds it or is dummy, else "auto"."""
        spec = self.speculative_config
        is_held = spec is not None and spec.method in HEADS and spec.method in WITHOUT_MODEL
        return self.load_format if is_held or self.load_format == DUMMY else "auto"

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from the keyword arguments of ``LLM``: fields, or long flags with underscores.

        Raises:
            ConfigError: an option is unknown or impossible, or given by two names.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        names = {name: name for name in fields} | {
            flag.removeprefix("--").replace("-", "_"): name
            for name, field in fields.items()
            for flag in field.metadata["spellings"]
            if flag.startswith("--")
        }
        given: dict[str, str] = {}
        for name in options:
            if name not in names:
                raise ConfigError(f"unknown option {name!r}", suggestion(name, fields))
            other = given.setdefault(names[name], name)
            if other != name:
                raise ConfigError(f"{other} and {name} are one option", "give one of the two")
        return cls(**{field: options[name] for field, name in given.items()})


def _speculation(given: Any) -> SpeculativeConfig | None:
    """Parse the option; None, or JSON's null in a command line, is plain decoding."""
    is_none = given is None or (isinstance(given, str) and given == "null")
    return None if is_none else SpeculativeConfig.parse(given)


_OF_RESULTS = (
    "model",
    "tokenizer",
    "chat_template",
    "generation_config",
    "dtype",
    "kv_cache_dtype",
    "device",
    "load_format",
    "max_model_len",
    "fast_prompts_from",
    "tensor_parallel_size",
    "logprobs_mode",
    "enable_return_routed_experts",
)
_PATHS = ("model", "tokenizer", "chat_template", "generation_config", "swap_dir")

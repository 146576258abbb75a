"""The configurations of ``drive.py`` and the options that both engines share.

Shared: random weights, bf16, 256 requests at most, no prefix cache, the same KV memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

#: Probability that draft i and all drafts before it are accepted.
SYNTHETIC = {
    "num_speculative_tokens": 3,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.80, 0.64, 0.51],
}
#: Five drafts of an MTP module.
SYNTHETIC5 = SYNTHETIC | {
    "num_speculative_tokens": 5,
    "synthetic_acceptance_rates": [0.80, 0.64, 0.51, 0.41, 0.33],
}
LOOKUP = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
DENSE_LEN, HYBRID_LEN = 33024, 32768


class Config(NamedTuple):
    """A configuration: a model's folder and the speculative config.

    Attributes:
        max_model_len: default length of the longest request.
        kv_gib: KV memory; for hybrids in vLLM it includes all recurrent state.
        speculation: keys that both engines share; a drafter is a folder beside the model's.
    """

    model: str
    max_model_len: int
    kv_gib: dict[str, float]
    speculation: dict[str, Any] | None = None


_KV = {"sametoken": 30.0, "vllm": 30.0}
#: Of hybrids with drafts: vLLM keeps a state for each.
_KV_AND_DRAFTS = {"sametoken": 30.0, "vllm": 72.0}
_MTP3 = {"method": "mtp", **SYNTHETIC}
CONFIGS = {
    "plain": Config("qwen3-8b", DENSE_LEN, _KV),
    "eagle3": Config(
        "qwen3-8b",
        DENSE_LEN,
        {"sametoken": 31.0, "vllm": 31.0},
        {"method": "eagle3", "model": "eagle3-qwen3-8b", **SYNTHETIC},
    ),
    "small": Config("qwen3-0.6b", DENSE_LEN, _KV),
    "llama": Config("llama-3.1-8b", DENSE_LEN, _KV),
    "llamaeagle3": Config(
        "llama-3.1-8b",
        DENSE_LEN,
        _KV,
        {"method": "eagle3", "model": "eagle3-llama-3.1-8b", **SYNTHETIC},
    ),
    "q35": Config("qwen35-9b", HYBRID_LEN, _KV),
    "q35mtp3": Config("qwen35-9b", HYBRID_LEN, _KV_AND_DRAFTS, _MTP3),
    "ngram5": Config("qwen3-8b", DENSE_LEN, _KV, {**LOOKUP, "num_speculative_tokens": 5}),
    "fp8": Config("qwen3-8b-fp8", DENSE_LEN, _KV),
    "fp8blocks": Config("qwen3-8b-fp8-blocks", DENSE_LEN, _KV),
    "fp8static": Config("qwen3-8b-fp8-static", DENSE_LEN, _KV),
    "w4a16": Config("qwen3-8b-w4a16", DENSE_LEN, _KV),
    "moe": Config("qwen3-30b-a3b", DENSE_LEN, _KV),
    "moefp8": Config("qwen3-30b-a3b-fp8", DENSE_LEN, _KV),
    "moefp8blocks": Config("qwen3-30b-a3b-fp8-blocks", DENSE_LEN, _KV),
    "q35moefp8": Config("qwen35-35b-a3b-fp8", HYBRID_LEN, _KV),
    "q35moefp8mtp3": Config("qwen35-35b-a3b-fp8", HYBRID_LEN, _KV_AND_DRAFTS, _MTP3),
    "nemotronfp8": Config("nano-30b-a3b-fp8", DENSE_LEN, _KV),
    "moew4a16": Config("qwen3-30b-a3b-w4a16", DENSE_LEN, _KV),
    "moenvfp4": Config("qwen3-30b-a3b-nvfp4", DENSE_LEN, _KV),
    "nemotron": Config("lightning-30b-a3b", DENSE_LEN, _KV),
    "nemotronmtp5": Config("lightning-30b-a3b", DENSE_LEN, _KV, {"method": "mtp", **SYNTHETIC5}),
    "glm": Config("glm-4.7-flash", DENSE_LEN, _KV),
    "glmmtp3": Config("glm-4.7-flash", DENSE_LEN, _KV, _MTP3),
    "gptoss": Config("gpt-oss-20b", DENSE_LEN, _KV),
    "gemma3": Config("gemma-3-12b", DENSE_LEN, _KV),
    "graniteh": Config("granite-4.0-h-small", HYBRID_LEN, _KV),
}


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Options given on the command line; 0 takes the configuration's value."""

    config: str
    models: Path
    device: str = "auto"
    max_num_seqs: int = 256
    max_model_len: int = 0
    kv_gib: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        """The target's folder."""
        return self.models / CONFIGS[self.config].model

    @property
    def has_tokenizer(self) -> bool:
        """Whether the target's folder has a tokenizer, which grammars need."""
        return (self.model / "tokenizer.json").is_file()

    @property
    def model_config(self) -> dict[str, Any]:
        """The target's config.json, of its text part."""
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        return config.get("text_config") or config

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary size."""
        return int(self.model_config["vocab_size"])

    def options(self, engine: str) -> dict[str, Any]:
        """Return the options that both engines share."""
        config = CONFIGS[self.config]
        options: dict[str, Any] = {
            "model": str(self.model),
            "load_format": "dummy",
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len or config.max_model_len,
            "kv_cache_memory_bytes": int((self.kv_gib or config.kv_gib[engine]) * 2**30),
            "enable_prefix_caching": False,
            "skip_tokenizer_init": not self.has_tokenizer,
        }
        if config.speculation:
            speculation = dict(config.speculation)
            if "model" in speculation:
                speculation["model"] = str(self.models / speculation["model"])
            options["speculative_config"] = speculation
        return options

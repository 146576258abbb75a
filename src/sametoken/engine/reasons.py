"""Why options have values that the user did not give."""

from __future__ import annotations

import dataclasses

from sametoken.config import EngineConfig
from sametoken.engine.resolve import CPU_KV_BYTES, DEVICE_DEFAULTS, no_gpu
from sametoken.types.units import in_units

_DEFAULTS = {
    "tokenizer": "the model's own",
    "kv_cache_dtype": "the model's",
    "prefill_chunk_size": "as max_num_batched_tokens",
    "speculative_config": "none was given: plain decoding",
}
_KV_MEMORY = {
    "cpu": (f"{in_units(CPU_KV_BYTES)} on a CPU", "without effect on a CPU"),
    "cuda": ("what gpu_memory_utilization leaves", "the default"),
}


def reasons_of_defaults(given: EngineConfig, device_type: str) -> dict[str, str]:
    """The reason for every option that has its default.

    Args:
        given: the user's options.
        device_type: "cpu" or "cuda".
    """
    kind = "GPU" if device_type == "cuda" else "CPU"
    memory, utilization = _KV_MEMORY[device_type]
    reasons = {
        **_DEFAULTS,
        **dict.fromkeys(DEVICE_DEFAULTS[device_type], f"the default of a {kind}"),
        "device": "there is a GPU" if device_type == "cuda" else no_gpu(),
        "kv_cache_memory_bytes": "num_kv_blocks decides" if given.num_kv_blocks else memory,
        "gpu_memory_utilization": utilization,
    }
    return {
        field.name: reasons.get(field.name, "the default")
        for field in dataclasses.fields(EngineConfig)
        if getattr(given, field.name) == field.default
    }

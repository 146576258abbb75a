"""Summarizes a resolved engine."""

from __future__ import annotations

import dataclasses
import json

from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.engine.resolve import ResolvedConfig
from sametoken.ops.dispatch import CHOICE
from sametoken.types.engine_summary import EngineSummary, Setting
from sametoken.types.units import in_tokens, in_units

_RESOLVED = ("dtype", "kv_cache_dtype", "device", "max_model_len", "num_kv_blocks")
_TOKENS = ("max_model_len", "max_num_batched_tokens", "prefill_chunk_size", "block_size")
_BYTES = ("kv_cache_memory_bytes", "kept_states_memory_bytes")
_GIB = ("swap_space", "kv_offloading_size", "swap_dir_size")
_SYNTHETIC = "weights and acceptance that are made up"
_KERNELS = f"the fastest that work here, unless {CHOICE} names them"
_ATTENTION = "gluon on Hopper GPUs with KV in bf16 and heads up to 256, else as kernels"
_NO_RECURRENT = "the model has no recurrent layers"


def summarise(resolved: ResolvedConfig) -> EngineSummary:
    """Summarize a resolved engine."""
    config, model = resolved.config, resolved.model
    speculative = config.speculative_config
    return EngineSummary(
        model=config.model,
        model_path=str(resolved.model_path),
        max_model_len=resolved.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        device=str(resolved.device),
        dtype=str(resolved.dtype).removeprefix("torch."),
        method=speculative.label if speculative else None,
        num_speculative_tokens=config.num_speculative_tokens,
        block_size=config.block_size,
        num_kv_blocks=resolved.num_kv_blocks,
        world_size=config.tensor_parallel_size,
        logprobs_mode=config.logprobs_mode,
        max_loras=max(config.max_loras, len(config.lora_modules)) if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank,
        synthetic=config.synthetic,
        settings=explanation(resolved),
    )


def explanation(resolved: ResolvedConfig) -> tuple[Setting, ...]:
    """Every setting in people's units, with the reason if the user did not set it."""
    options = {name: getattr(resolved.config, name) for name in EngineConfig.__slots__}
    options |= {name: getattr(resolved, name) for name in _RESOLVED}
    options["model"] = resolved.model_path
    reasons = {name: resolved.reasons.get(name, "") for name in options}
    if str(resolved.model_path) != resolved.config.model:
        reasons["model"] = f"the path of {resolved.config.model!r}"
    settings = [Setting(name, _text(name, options[name]), reasons[name]) for name in options]
    return (*settings, *_facts(resolved))


def _facts(resolved: ResolvedConfig) -> tuple[Setting, ...]:
    """What follows from the options, and from what."""
    memory, config = resolved.request_memory, resolved.config
    blocks = f"{resolved.num_kv_blocks} blocks of {config.block_size} tokens, and a reserved one"
    own, weights = "of the model and its drafter", "of the model, in memory"
    if resolved.adapters_bytes:
        weights = f"of the model, and {in_units(resolved.adapters_bytes)} of them for adapters"
    states = f"of {config.max_num_seqs} slots and a reserved one"
    pending = "raw inputs of rows that no recurrent state covers"
    if k := memory.num_drafts:
        each = in_units(memory.state_per_draft)
        pending += f" yet, {k} drafts among them; a state for each draft would take {each}"
    sizes = {
        "weights_bytes": (resolved.weights_bytes, weights),
        "kv_bytes": (resolved.kv_bytes, blocks),
        "recurrent_bytes": (resolved.recurrent_bytes, states),
        "step_bytes": (resolved.step_bytes, f"of a step of {config.max_num_batched_tokens} rows"),
        "kv_bytes_per_token": (memory.kv_per_token + memory.draft_kv_per_token, own),
        "recurrent_bytes_per_request": (memory.recurrent_state + memory.draft_recurrent, own),
        "pending_bytes_per_request": (memory.all_pending, pending),
    }
    return (
        Setting("synthetic", ", ".join(config.synthetic) or "nothing", _SYNTHETIC),
        Setting("architecture", resolved.model.architecture, "named by the checkpoint"),
        Setting("kernels", resolved.kernels, _KERNELS),
        Setting("attention_kernels", resolved.attention_kernels, _ATTENTION),
        *(
            Setting(name, in_units(size), why if size else _NO_RECURRENT)
            for name, (size, why) in sizes.items()
        ),
        Setting("kept_states_bytes", in_units(resolved.kept_states_bytes), _kept_states(resolved)),
    )


def _kept_states(resolved: ResolvedConfig) -> str:
    if resolved.num_kept_states:
        return f"of {resolved.num_kept_states} kept states and a reserved one, for prefix caching"
    return "prefix caching is off" if resolved.recurrent_bytes else _NO_RECURRENT


def _text(name: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, SpeculativeConfig):
        given = {
            one.name: getattr(value, one.name)
            for one in dataclasses.fields(value)
            if getattr(value, one.name) != one.default
        }
        return json.dumps(given)
    if isinstance(value, int) and name in _TOKENS:
        return in_tokens(value)
    if isinstance(value, int) and name in _BYTES:
        return in_units(value)
    unit = " GiB" if name in _GIB else ""
    return str(value).removeprefix("torch.") + unit

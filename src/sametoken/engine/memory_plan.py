"""The engine's memory: KV blocks and the longest request, and whether all of it fits."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sametoken.config import EngineConfig
from sametoken.engine.kept_memory import count_kept_states, kept_states_bytes, memory_beside
from sametoken.engine.resolve import ResolvedConfig, resolve_max_model_len
from sametoken.errors import ConfigError
from sametoken.models.base import ModelConfig
from sametoken.ops.cache_types import LayerCache, blocks_within, bytes_per_block
from sametoken.types.units import in_units


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The numbers of KV blocks and of kept states, and the maximum length of a request."""

    max_model_len: int
    num_kv_blocks: int
    num_kept_states: int
    reasons: dict[str, str]


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    caches: tuple[LayerCache, ...],
    extra_tokens: int,
    budget: int,
) -> MemoryPlan:
    """Choose the numbers of KV blocks and of kept states, and a request's maximum length.

    Args:
        config: the user's options.
        model: the target's architecture.
        caches: caches of the layers of the target and of a drafter.
        extra_tokens: positions beyond a request's length that drafts may occupy.
        budget: KV memory in bytes.

    Raises:
        ConfigError: one request of ``max_model_len`` tokens does not fit, or without that option
            not even one of a block.
    """
    num_kept, reasons = count_kept_states(config, caches, budget)
    budget -= kept_states_bytes(config, caches, num_kept)
    block_size = config.block_size
    max_len = resolve_max_model_len(config, model)
    if config.max_model_len is None:
        declared = model.max_position_embeddings
        reasons["max_model_len"] = (
            "the model's longest position"
            if max_len == declared
            else f"of {declared} that the model declares"
        )
    most_useful = config.max_num_seqs * -(-(max_len + extra_tokens) // block_size)
    block_bytes = bytes_per_block(caches, block_size)
    if not block_bytes:
        # A model without attention has no KV: blocks take no memory.
        num_blocks = min(config.num_kv_blocks or most_useful, most_useful)
    elif config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        num_blocks = min(blocks_within(budget, block_bytes), most_useful)
        reasons["num_kv_blocks"] = f"{in_units(num_blocks * block_bytes)} of {in_units(budget)}"
    longest = num_blocks * block_size - extra_tokens
    least = min(max_len, _shortest(config)) if config.max_model_len is None else max_len
    if longest < least:
        raise _too_long(config, caches, least, max(longest, 0), extra_tokens)
    if longest < max_len:
        max_len = longest
        reasons["max_model_len"] = "what the KV memory holds for one request"
    return MemoryPlan(max_len, num_blocks, num_kept, reasons)


def _shortest(config: EngineConfig) -> int:
    """The least ``max_model_len`` worth proposing: a block, of a prompt and an output token."""
    return max(config.block_size, 2)


def _too_long(
    config: EngineConfig,
    caches: tuple[LayerCache, ...],
    least: int,
    longest: int,
    extra_tokens: int,
) -> ConfigError:
    """The refusal where ``longest`` tokens fit, and a request must have room for ``least``."""
    needed = -(-(least + extra_tokens) // config.block_size)
    block_bytes = bytes_per_block(caches, config.block_size)
    all_bytes = memory_beside(config, caches, (needed + 1) * block_bytes)
    option, value = "kv_cache_memory_bytes", all_bytes
    if config.num_kv_blocks is not None:
        option, value = "num_kv_blocks", needed
    shorter = f"max_model_len={longest} or less, or " if longest >= _shortest(config) else ""
    even = "even " if config.max_model_len is None else ""
    return ConfigError(
        f"{even}max_model_len={least} takes {in_units(needed * block_bytes)} of KV for a request, "
        f"and the KV memory holds {longest} tokens",
        f"use {shorter}{option}={value} or more",
    )


def require_memory(resolved: ResolvedConfig, extra_tokens: int) -> None:
    """Refuse caches and tables that exceed the memory, before they are allocated.

    Args:
        resolved: the engine's settings.
        extra_tokens: as for ``plan_memory``.

    Raises:
        ConfigError: names the number of KV blocks that fit, or the options to lower.
    """
    config, num_blocks = resolved.config, resolved.num_kv_blocks
    available = _memory_of(resolved.device)
    table_bytes = (
        8 * (config.max_num_seqs + 1) * (resolved.max_model_len + config.num_speculative_tokens + 1)
    )
    state_bytes = resolved.recurrent_bytes + resolved.kept_states_bytes
    others = state_bytes + table_bytes + resolved.step_bytes
    needed = resolved.kv_bytes + others
    if needed <= available:
        return
    block_bytes = resolved.kv_bytes // (num_blocks + 1)
    rest = available - others
    fits = blocks_within(rest, block_bytes) if block_bytes else 0
    least = (config.max_model_len or _shortest(config)) + extra_tokens
    raise ConfigError(
        f"{num_blocks} KV blocks, max_num_seqs={config.max_num_seqs} with "
        f"max_model_len={resolved.max_model_len}, and a step of {config.max_num_batched_tokens} "
        f"rows need {in_units(needed)}, and {resolved.device.type} memory has "
        f"{in_units(available)}",
        f"use num_kv_blocks={fits} or fewer, or set kv_cache_memory_bytes"
        if fits * config.block_size >= least
        else "lower max_num_batched_tokens, max_num_seqs or max_model_len",
    )


def _memory_of(device: torch.device) -> int:
    """Free bytes on a GPU after loading the weights; all memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""Swap space from its limits: host blocks, and places in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError
from sametoken.io.swap_file import opened_in
from sametoken.ops.cache_types import LayerCache, bytes_per_block
from sametoken.state.host_blocks import blocks_within
from sametoken.types.units import in_units

GIB = 2**30

#: Host blocks, and blocks in the file, that the scheduler keeps lists of.
MOST_BLOCKS = 2**22


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """How many KV blocks may be swapped.

    Attributes:
        num_host_blocks: blocks of host memory.
        num_idle_host_blocks: how many of them KV from the prefix cache may have.
        num_file_blocks: blocks in the file.
        limit: bytes of host memory, at most.
        reasons: option name to what its value comes to.
    """

    num_host_blocks: int
    num_idle_host_blocks: int
    num_file_blocks: int
    limit: int
    reasons: dict[str, str]


def require_swap(config: EngineConfig) -> None:
    """Refuse a swap file for several ranks or where none can be, and too much host memory.

    Raises:
        ConfigError: names the option.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = config.kv_offloading_size * GIB * config.tensor_parallel_size
    if wanted > memory:
        raise ConfigError(
            f"kv_offloading_size={config.kv_offloading_size} takes {in_units(int(wanted))} of "
            f"memory, and the machine has {in_units(memory)}",
            "lower kv_offloading_size",
        )
    if config.swap_dir is not None and config.tensor_parallel_size > 1:
        raise ConfigError(
            "swap_dir holds the KV of one rank, and tensor_parallel_size is "
            f"{config.tensor_parallel_size}",
            "leave swap_dir out; swap_space and kv_offloading_size serve every rank",
        )
    if config.swap_dir is not None:
        opened_in(config.swap_dir).close()


def plan_swap_of(
    config: EngineConfig, caches: tuple[LayerCache, ...], max_model_len: int
) -> SwapPlan:
    """``plan_swap`` for the caches of the target and the drafter, and requests of this length."""
    most_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    return plan_swap(config, bytes_per_block(caches, config.block_size), most_useful)


def plan_swap(config: EngineConfig, block_bytes: int, most_useful: int) -> SwapPlan:
    """Turn the limits into blocks.

    Args:
        config: the user's options, sizes resolved.
        block_bytes: bytes of a KV block of the target and the drafter; 0 without attention.
        most_useful: blocks that all requests can have together.
    """
    if not block_bytes:
        return SwapPlan(most_useful, 0, 0, 0, {})
    for_requests = int(config.swap_space * GIB)
    for_prefixes = int(config.kv_offloading_size * GIB) if config.enable_prefix_caching else 0
    idle = min(blocks_within(for_prefixes, block_bytes), MOST_BLOCKS)
    requests = min(blocks_within(for_requests, block_bytes), most_useful, MOST_BLOCKS)
    in_file = int(config.swap_dir_size * GIB) // block_bytes if config.swap_dir else 0
    in_file = min(in_file, MOST_BLOCKS)
    no_cache = "without effect: the prefix cache is off"
    reasons = {
        "swap_space": f"{requests} blocks of {in_units(block_bytes)}",
        "kv_offloading_size": f"{idle} blocks" if config.enable_prefix_caching else no_cache,
        "swap_dir_size": f"{in_file} blocks" if config.swap_dir else "without effect: no swap_dir",
    }
    return SwapPlan(requests + idle, idle, in_file, for_requests + for_prefixes, reasons)

"""Memory of recurrent states that are kept for prefix caching."""

from __future__ import annotations

from dataclasses import replace

from sametoken.config import EngineConfig
from sametoken.ops.cache_types import LayerCache, bytes_per_slot
from sametoken.types.units import in_units

#: The default is this fraction of the KV memory.
KV_SHARE = 8

#: Kept states per request that can run: each conversation needs one or two.
PER_REQUEST = 8


def count_kept_states(
    config: EngineConfig, caches: tuple[LayerCache, ...], kv_bytes: int
) -> tuple[int, dict[str, str]]:
    """The number of states to keep, without the reserved one, and the reason for it.

    Args:
        config: the user's options, sizes resolved.
        caches: caches of the layers of the target and of a drafter.
        kv_bytes: KV memory, which the states are taken from.
    """
    state_bytes = bytes_per_slot(caches, config.num_speculative_tokens)
    if not state_bytes or not config.enable_prefix_caching:
        return 0, {}
    asked, reasons = config.kept_states_memory_bytes, {}
    if asked is None:
        asked = kv_bytes // KV_SHARE
        reasons["kept_states_memory_bytes"] = f"1/{KV_SHARE} of {in_units(kv_bytes)} KV memory"
    # One more is reserved.
    count = min(asked // state_bytes - 1, PER_REQUEST * config.max_num_seqs)
    return max(count, 0), reasons


def kept_states_bytes(
    config: EngineConfig, caches: tuple[LayerCache, ...], num_kept_states: int
) -> int:
    """Bytes of all kept states and of the reserved one."""
    state_bytes = bytes_per_slot(caches, config.num_speculative_tokens)
    return (num_kept_states + 1) * state_bytes if num_kept_states else 0


def memory_beside(config: EngineConfig, caches: tuple[LayerCache, ...], num_bytes: int) -> int:
    """KV memory that leaves ``num_bytes`` for blocks, whatever kept states take of it."""
    # An eighth of the whole is a seventh of the rest.
    total = num_bytes + -(-num_bytes // (KV_SHARE - 1))
    count, _ = count_kept_states(config, caches, total)
    return num_bytes + kept_states_bytes(config, caches, count)


def require_kept_states(
    config: EngineConfig, caches: tuple[LayerCache, ...], num_kept_states: int
) -> tuple[EngineConfig, dict[str, str]]:
    """Turn prefix caching off where no recurrent state can be kept; returns the reason too."""
    state_bytes = bytes_per_slot(caches, config.num_speculative_tokens)
    if not state_bytes or num_kept_states or not config.enable_prefix_caching:
        return config, {}
    why = f"off: kept_states_memory_bytes holds less than two states of {in_units(state_bytes)}"
    return replace(config, enable_prefix_caching=False), {"enable_prefix_caching": why}

"""Swap space from options: blocks within the limits, and options that cannot be."""

from __future__ import annotations

import pytest

from sametoken.config import EngineConfig
from sametoken.engine.swap_plan import GIB, MOST_BLOCKS, plan_swap, require_swap
from sametoken.errors import ConfigError

MIB = 2**20


def test_each_limit_has_its_blocks():
    config = EngineConfig(swap_space=1.5, kv_offloading_size=0.5, swap_dir="/tmp", swap_dir_size=3)
    plan = plan_swap(config, MIB, 10**6)
    assert (plan.num_host_blocks, plan.num_idle_host_blocks) == (2048, 512)
    assert (plan.num_file_blocks, plan.limit) == (3072, 2 * GIB)
    assert plan.reasons["swap_space"] == "1536 blocks of 1.0 MiB"


def test_no_more_blocks_than_requests_can_fill_and_none_for_a_cache_that_is_off():
    config = EngineConfig(kv_offloading_size=1, enable_prefix_caching=False)
    plan = plan_swap(config, MIB, 100)
    assert (plan.num_host_blocks, plan.num_idle_host_blocks, plan.num_file_blocks) == (100, 0, 0)
    assert plan.reasons["kv_offloading_size"] == "without effect: the prefix cache is off"
    assert plan_swap(EngineConfig(swap_space=0), MIB, 100).num_host_blocks == 0


def test_tiny_blocks_make_no_endless_lists():
    config = EngineConfig(kv_offloading_size=1, swap_dir="/tmp", swap_dir_size=2**20)
    plan = plan_swap(config, 16, 10)
    assert max(plan.num_idle_host_blocks, plan.num_file_blocks) == MOST_BLOCKS


def test_a_model_without_attention_swaps_nothing_and_loses_nothing():
    assert plan_swap(EngineConfig(), 0, 30).num_host_blocks == 30


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"swap_dir": "/tmp", "tensor_parallel_size": 2}, "swap_dir holds the KV of one rank"),
        ({"swap_dir": "/dev/null"}, "swap_dir /dev/null cannot hold a file"),
        ({"kv_offloading_size": 2**20}, "kv_offloading_size=1048576 takes 1024.0 TiB"),
    ],
)
def test_what_cannot_be_is_refused(options, cause):
    with pytest.raises(ConfigError, match=cause):
        require_swap(EngineConfig(**options))


@pytest.mark.parametrize("name", ["swap_space", "kv_offloading_size", "swap_dir_size"])
@pytest.mark.parametrize("value", [-1, float("nan"), 2**21])
def test_sizes_outside_their_limits_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        EngineConfig(**{name: value})

"""How many recurrent states are kept, of which memory, and where none can be."""

from __future__ import annotations

import pytest
import torch

from sametoken.config import EngineConfig
from sametoken.engine.kept_memory import (
    PER_REQUEST,
    count_kept_states,
    kept_states_bytes,
    memory_beside,
    require_kept_states,
)
from sametoken.ops.cache_types import PagedKV, Recurrent, bytes_per_slot
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta

KV = (PagedKV(4, 8, 8, torch.bfloat16),) * 2
HYBRID = (*KV, Recurrent(GatedDelta(1, 2, 4, 4, 4), torch.float32))
STATE = bytes_per_slot(HYBRID, 0)


def config(**options) -> EngineConfig:
    return EngineConfig(**{"max_num_seqs": 4} | options)


def test_an_eighth_of_the_kv_memory_holds_states_and_a_reserved_one():
    count, reasons = count_kept_states(config(), HYBRID, 8 * 6 * STATE + 7)
    assert count == 5
    assert reasons["kept_states_memory_bytes"].startswith("1/8 of ")
    assert kept_states_bytes(config(), HYBRID, count) == 6 * STATE


@pytest.mark.parametrize(("asked", "count"), [(10 * STATE, 9), (10 * STATE - 1, 8), (0, 0)])
def test_what_is_asked_for_holds_as_many_as_fit(asked, count):
    options = config(kept_states_memory_bytes=asked)
    assert count_kept_states(options, HYBRID, 2**30) == (count, {})


def test_there_are_no_more_than_conversations_need():
    count, _ = count_kept_states(config(), HYBRID, 2**40)
    assert count == 4 * PER_REQUEST


def test_drafts_take_room_in_a_kept_state():
    drafted = config(speculative_config="ngram", kept_states_memory_bytes=10 * STATE)
    assert count_kept_states(drafted, HYBRID, 2**30)[0] < 9


@pytest.mark.parametrize(
    ("caches", "caching"), [(KV, True), (HYBRID, False)], ids=["dense", "caching is off"]
)
def test_other_engines_keep_no_states(caches, caching):
    options = config(enable_prefix_caching=caching)
    assert count_kept_states(options, caches, 2**30) == (0, {})
    assert kept_states_bytes(options, caches, 0) == 0
    assert require_kept_states(options, caches, 0) == (options, {})


@pytest.mark.parametrize("asked", [None, 0, 5 * STATE])
@pytest.mark.parametrize("wanted", [1, 7 * STATE, 50 * STATE + 3, 10**4 * STATE])
def test_memory_that_a_refusal_names_leaves_what_is_wanted_beside_the_states(asked, wanted):
    options = config(kept_states_memory_bytes=asked)
    least = memory_beside(options, HYBRID, wanted)
    for more in (0, 1, STATE, 9 * STATE, 10**6 * STATE):
        count, _ = count_kept_states(options, HYBRID, least + more)
        assert least + more - kept_states_bytes(options, HYBRID, count) >= wanted
    assert memory_beside(options, KV, wanted) == wanted


def test_without_room_for_a_state_prefix_caching_is_off_and_says_why():
    options = config(kept_states_memory_bytes=STATE)
    assert count_kept_states(options, HYBRID, 2**30)[0] == 0
    found, reasons = require_kept_states(options, HYBRID, 0)
    assert not found.enable_prefix_caching
    assert reasons["enable_prefix_caching"].startswith("off: ")
    assert require_kept_states(options, HYBRID, 3) == (options, {})

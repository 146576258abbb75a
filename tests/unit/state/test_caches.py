"""One allocation from declarations: what layers share, what it takes, and what swaps move."""

from __future__ import annotations

import pytest
import torch

from helpers.budgets import resident_bytes
from helpers.decaying_sum import DecayingSum
from helpers.recurrent import poison
from sametoken.ops.cache_types import (
    LatentKV,
    PagedKV,
    Recurrent,
    bytes_per_block,
    bytes_per_slot,
    common_window,
)
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.runner.swap import SwapStore
from sametoken.state.caches import ModelCache
from sametoken.types.plan import StepPlan, SwapIn, SwapOut

BF16, FP32 = torch.bfloat16, torch.float32
WIDE, NARROW = PagedKV(2, 6, 6, BF16), PagedKV(1, 8, 4, BF16, window=5)
CACHES = (
    WIDE,
    Recurrent(GatedDelta(1, 2, 4, 4, 3), BF16),
    PagedKV(2, 6, 6, BF16, window=3),
    LatentKV(5, 3, FP32),
    Recurrent(DecayingSum(3), FP32),
    NARROW,
)


def allocate(caches=CACHES, device="cpu", **changes) -> ModelCache:
    sizes = {"num_blocks": 7, "block_size": 4, "max_num_seqs": 2, "num_drafts": 5} | changes
    return ModelCache.allocate(caches, **sizes, device=torch.device(device))


def test_a_cpu_s_memory_is_taken_when_it_is_written():
    before = resident_bytes()
    layers = [PagedKV(8, 64, 64, torch.float8_e4m3fn)]
    keys, values = allocate(layers, num_blocks=2**14, block_size=16).blocks
    assert keys.nbytes + values.nbytes > 2**28
    assert resident_bytes() - before < 2**24
    assert not keys[0, -1].view(torch.uint8).any()
    keys.view(torch.uint8)[:, : 2**12] = 1
    assert resident_bytes() - before > 2**24


def test_memory_that_the_system_does_not_give_is_an_error_of_memory():
    with pytest.raises(MemoryError, match=r"no room for .*TiB of a cache"):
        allocate([WIDE], num_blocks=2**48)


def test_what_is_counted_is_what_is_allocated():
    cache = allocate()
    assert sum(memory.nbytes for memory in cache.blocks) == 8 * bytes_per_block(CACHES, 4)
    assert sum(memory.nbytes for memory in cache.slots) == 3 * bytes_per_slot(CACHES, 5)
    assert bytes_per_block([LatentKV(512, 64, BF16)], 16) == 16 * 576 * 2
    assert bytes_per_block([CACHES[1]], 4) == bytes_per_slot([WIDE], 5) == 0


def test_layers_have_their_own_memory_and_alike_ones_lie_side_by_side():
    cache = allocate()
    wide, delta, windowed, latent, total, narrow = cache.layers
    assert wide.keys.shape == (8, 2, 4, 6)
    assert wide.keys.stride() == windowed.values.stride()
    assert wide.keys.untyped_storage().data_ptr() == windowed.keys.untyped_storage().data_ptr()
    assert (narrow.keys.shape, narrow.values.shape) == ((8, 1, 4, 8), (8, 1, 4, 4))
    assert (latent.vectors.shape, latent.rank) == ((8, 4, 8), 5)
    assert (delta.states.shape, delta.history.shape) == ((3, 2, 4, 4), (3, 2, 16))
    assert (total.states.shape, total.history.shape) == ((3, 3), (3, 0, 0))
    assert delta.max_pending == total.max_pending == cache.folded.max_pending == 5
    wide.keys.zero_()
    windowed.keys.fill_(1.0)
    assert not wide.keys.any()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_memory_of_slots_begins_at_multiples_of_16_bytes_in_every_layer(max_num_seqs):
    """Else a kernel's sums would depend on the number of slots."""
    layers = [Recurrent(Mamba2(3, 5, 1, 6, 4), BF16)] * 2
    cache = allocate(layers, "meta", num_blocks=0, max_num_seqs=max_num_seqs, num_drafts=0)
    for memory in cache.layers:
        assert memory.max_runs == max_num_seqs
        for part in (memory.states, memory.history, memory.pending_mixed, memory.pending_gates):
            assert part.is_contiguous()
            assert part.data_ptr() % 16 == 0


def test_without_recurrent_layers_nothing_is_folded():
    cache = allocate((WIDE,))
    assert (cache.folded, cache.slots, cache.reserved_block) == (None, (), 7)


def test_a_rank_has_its_heads_and_the_whole_latent():
    assert [cache.divided(2) for cache in (WIDE, CACHES[3])] == [PagedKV(1, 6, 6, BF16), CACHES[3]]
    assert Recurrent(GatedDelta(2, 4, 4, 4, 3), BF16).divided(2) == CACHES[1]


def test_a_block_table_has_a_window_if_all_its_layers_have_one():
    recurrent, latent = CACHES[1], CACHES[3]
    assert common_window((NARROW, CACHES[2], recurrent)) == 5
    for others in ((WIDE,), (latent,), (WIDE, recurrent)):
        assert common_window((NARROW, *others)) is None
    assert common_window((recurrent,)) is None


def test_a_swap_moves_a_request_s_blocks_of_every_layer_and_no_slot():
    cache = poison(allocate())
    for memory in cache.blocks:
        memory.normal_()
    held = [memory[:, [4, 1]].clone() for memory in cache.blocks]
    store = SwapStore((cache,), 2**20, pinned=False)
    store.move_out(StepPlan(1, swap_outs=(SwapOut(0, (4, 1), (8, 3)),)))
    for memory in cache.blocks:
        memory.fill_(float("nan"))
    store.move_in(StepPlan(2, swap_ins=(SwapIn(0, (2, 6), (8, 3)),)))
    for memory, saved in zip(cache.blocks, held, strict=True):
        assert torch.equal(memory[:, [2, 6]], saved)
        assert memory[:, [0, 1, 3, 4, 5, 7]].isnan().all()
    assert all(memory.isnan().all() for memory in cache.slots)

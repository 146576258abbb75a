"""Blocks: who holds them, and the prefixes they are found by."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.errors import InvariantError
from sametoken.scheduler.block_pool import BlockPool, PrefixCache, block_keys


def make_pool(num_blocks):
    pool = BlockPool(num_blocks)
    return pool, pool.prefix_cache


def test_blocks_come_and_go():
    pool, _ = make_pool(3)
    table = pool.allocate(2)
    assert table == [0, 1]
    assert (pool.num_available, pool.num_referenced) == (1, 2)
    pool.check_integrity([table])
    pool.release(table)
    assert (pool.num_available, pool.num_referenced) == (3, 0)
    pool.check_integrity([])


def test_more_than_available_is_refused_and_takes_nothing():
    pool, _ = make_pool(2)
    with pytest.raises(InvariantError, match="3 blocks requested, 2 available"):
        pool.allocate(3)
    pool.check_integrity([])


def test_a_shared_block_lives_until_its_last_owner_leaves():
    pool, cache = make_pool(2)
    [block] = pool.allocate(1)
    cache.insert(b"k", block)
    pool.share([block])
    assert pool.references(block) == 2
    pool.check_integrity([[block], [block]])
    pool.release([block])
    assert pool.num_available == 1
    pool.release([block])
    assert pool.num_available == 2
    assert cache.match([b"k"]) == (block,)


def test_unreferenced_cached_blocks_go_last_and_least_recently_used_first():
    pool, cache = make_pool(4)
    old, new, plain = ([pool.allocate(1)[0]] for _ in range(3))
    cache.insert(b"old", old[0])
    cache.insert(b"new", new[0])
    pool.release(old)
    pool.release(new)
    pool.release(plain)
    # The two that no prefix needs, then by age.
    assert set(pool.allocate(2)) == {plain[0], 3}
    assert len(cache.blocks()) == 2
    assert pool.allocate(1) == old
    assert cache.match([b"old"]) == ()
    assert cache.match([b"new"]) == (new[0],)


def test_use_makes_a_cached_block_young_again():
    pool, cache = make_pool(2)
    first, second = pool.allocate(2)
    cache.insert(b"first", first)
    cache.insert(b"second", second)
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_a_chain_is_evicted_from_its_far_end():
    pool, cache = make_pool(3)
    table = pool.allocate(3)
    for index, block in enumerate(table):
        cache.insert(bytes([index]), block)
    pool.release(table)
    assert [pool.allocate(1)[0] for _ in range(3)] == table[::-1]


def test_a_referenced_cached_block_is_never_evicted():
    pool, cache = make_pool(2)
    [block] = pool.allocate(1)
    cache.insert(b"k", block)
    assert pool.allocate(1) != [block]
    with pytest.raises(InvariantError):
        pool.allocate(1)


def test_a_double_release_is_an_error():
    pool, _ = make_pool(1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(InvariantError, match="block 0 was released twice"):
        pool.release(table)


def test_integrity_sees_leaks_double_owners_and_lost_entries():
    pool, cache = make_pool(2)
    table = pool.allocate(1)
    for wrong in ([], [table, table], [[1]]):
        with pytest.raises(InvariantError, match="reference counts differ"):
            pool.check_integrity(wrong)
    cache.insert(b"k", table[0])
    pool.release(table)
    cache.forget(table[0])
    with pytest.raises(InvariantError, match="not indexed"):
        pool.check_integrity([])


TOKENS = st.lists(st.integers(0, 2), max_size=12).map(tuple)


def test_only_full_blocks_have_keys():
    assert [len(block_keys(range(n), 4, 0)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_block_needs_its_lookahead_inside_the_prompt():
    assert [len(block_keys(range(n), 4, 2)) for n in (4, 5, 6, 9, 10)] == [0, 0, 1, 1, 2]


def test_the_next_token_is_part_of_the_key_only_under_lookahead():
    one, other = (1, 2, 3, 4, 5, 0), (1, 2, 3, 4, 6, 0)
    assert block_keys(one, 4, 0) == block_keys(other, 4, 0)
    assert block_keys(one, 4, 1) != block_keys(other, 4, 1)
    later = (1, 2, 3, 4, 5, 9)
    assert block_keys(one, 4, 1) == block_keys(later, 4, 1)
    assert block_keys(one, 4, 2) != block_keys(later, 4, 2)


def test_equal_blocks_after_different_ones_differ():
    assert block_keys((1, 1, 2, 2), 2, 0)[1] != block_keys((3, 1, 2, 2), 2, 0)[1]


def test_token_ids_do_not_run_together():
    assert block_keys((1, 256), 2, 0) != block_keys((257, 0), 2, 0)
    assert block_keys((1, 0), 2, 0) != block_keys((0, 1), 2, 0)


@given(TOKENS, TOKENS, st.integers(1, 4), st.integers(0, 2))
def test_keys_agree_exactly_as_far_as_the_prompts_do(one, other, block_size, lookahead):
    keys, other_keys = (block_keys(prompt, block_size, lookahead) for prompt in (one, other))
    for index, (a, b) in enumerate(zip(keys, other_keys, strict=False)):
        end = (index + 1) * block_size + lookahead
        assert (a == b) == (one[:end] == other[:end])


def test_match_stops_at_the_first_gap():
    cache = PrefixCache()
    for key, block in ((b"a", 5), (b"b", 3), (b"d", 9)):
        cache.insert(key, block)
    assert cache.match([b"a", b"b", b"c", b"d"]) == (5, 3)
    assert cache.match([b"c", b"a"]) == ()


def test_the_first_block_of_a_key_stays_and_a_block_has_one_key():
    cache = PrefixCache()
    cache.insert(b"a", 1)
    cache.insert(b"a", 2)
    cache.insert(b"b", 1)
    assert cache.match([b"a"]) == (1,)
    assert cache.match([b"b"]) == ()
    assert 2 not in cache
    assert len(cache.blocks()) == 1


def test_a_forgotten_block_matches_no_more():
    cache = PrefixCache()
    cache.insert(b"a", 1)
    cache.forget(1)
    cache.forget(1)
    assert cache.match([b"a"]) == ()
    cache.insert(b"a", 2)
    assert cache.match([b"a"]) == (2,)


def test_evicting_one_block_after_the_other_takes_the_same_time_for_each():
    pool, cache = make_pool(2**17)
    blocks = pool.allocate(pool.num_blocks)
    for block in blocks:
        cache.insert(block.to_bytes(4, "little"), block)
    pool.release(blocks)

    def seconds_for(count):
        began = time.thread_time()
        pool.allocate(count)
        return time.thread_time() - began

    early = seconds_for(2**12)
    pool.allocate(2**16)
    assert seconds_for(2**12) < 8 * early

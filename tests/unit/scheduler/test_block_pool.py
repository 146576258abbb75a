import pytest

from sametoken.errors import InvariantError
from sametoken.scheduler.block_pool import BlockPool, PrefixCache


def make_pool(num_blocks):
    cache = PrefixCache()
    return BlockPool(num_blocks, cache), cache


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
    assert len(cache) == 2
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

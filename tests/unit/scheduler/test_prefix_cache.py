from hypothesis import given
from hypothesis import strategies as st

from sametoken.scheduler.block_pool import PrefixCache, block_keys

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
    assert len(cache) == 1


def test_a_forgotten_block_matches_no_more():
    cache = PrefixCache()
    cache.insert(b"a", 1)
    cache.forget(1)
    cache.forget(1)
    assert cache.match([b"a"]) == ()
    cache.insert(b"a", 2)
    assert cache.match([b"a"]) == (2,)

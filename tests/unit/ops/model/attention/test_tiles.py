"""Query tiles of launches over runs: padding has few of its own."""

from __future__ import annotations

import pytest

from sametoken.ops.model.attention.tiles import most_tiles


@pytest.mark.parametrize("heads", [1, 20])
def test_padding_runs_add_a_tile_each_at_most(heads):
    for sizes in ([1, 4, 0, 17, 99, 110], [33, 33, 33], [32, 1, 1, 1], [0, 0, 1]):
        queries = [size * heads for size in sizes]
        needed = sum(-(-size // 32) for size in queries)
        most = most_tiles(len(sizes), max(queries), sum(queries), 32)
        assert needed <= most <= needed + len(sizes)
    assert most_tiles(1, 4096, 4096, 32) == 128
    assert most_tiles(8, 4096, 4096, 32) == 135
    assert most_tiles(256, 1, 4096, 16) == 256

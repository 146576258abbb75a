"""Host memory in segments: within its limit to the byte, and one place for each block."""

from __future__ import annotations

import pytest

from sametoken.state import host_blocks
from sametoken.state.host_blocks import HostBlocks, blocks_within


@pytest.mark.parametrize(
    ("limit", "block_bytes", "blocks"),
    [
        (0, 100, 0),
        (99, 100, 0),
        (128, 100, 1),
        (1000, 100, 5),
        (1024, 64, 16),
        (4096, 3, 1364),
        (3000, 2048, 1),
        (10_000, 3000, 2),
    ],
)
def test_segments_stay_within_the_limit(limit, block_bytes, blocks, monkeypatch):
    monkeypatch.setattr(host_blocks, "SEGMENT_BYTES", 1024)
    assert blocks_within(limit, block_bytes) == blocks
    held = HostBlocks(limit, block_bytes, pinned=False)
    assert not held._segments, "memory is taken as it is needed"
    for index in range(blocks):
        held[index].fill_(index % 251)
    assert sum(segment.nbytes for segment in held._segments.values()) <= limit
    for index in range(blocks):
        assert bytes(held.buffer(index)) == bytes([index % 251]) * block_bytes


def test_four_gib_of_large_blocks_lose_less_than_two_percent():
    block = 64 * 147_456
    assert 4 * 2**30 * 0.98 < blocks_within(4 * 2**30, block) * block <= 4 * 2**30

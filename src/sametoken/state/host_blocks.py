"""Host memory for KV blocks, taken in segments as it is needed."""

from __future__ import annotations

import torch
from torch import Tensor

#: Pinned memory is allocated in powers of two.
SEGMENT_BYTES = 2**28


def blocks_within(limit: int, block_bytes: int) -> int:
    """How many host blocks fit in ``limit`` bytes, segments and all."""
    segment = _segment_bytes(limit, block_bytes)
    return limit // segment * (segment // block_bytes)


def _segment_bytes(limit: int, block_bytes: int) -> int:
    """The bytes of a segment: a power of two that holds a block."""
    largest = 1 << max(0, min(limit, SEGMENT_BYTES).bit_length() - 1)
    return max(largest, 1 << (block_bytes - 1).bit_length())


class HostBlocks:
    """Blocks of ``block_bytes`` bytes each in host memory, pinned for a GPU.

    Args:
        limit: bytes, as in ``blocks_within``, which says how many blocks there are.
        block_bytes: bytes of a KV block over all caches.
        pinned: whether a GPU copies to and from them.
    """

    def __init__(self, limit: int, block_bytes: int, *, pinned: bool) -> None:
        self.block_bytes = block_bytes
        self._segment_bytes = _segment_bytes(limit, block_bytes)
        self._pinned = pinned
        self._segments: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        """[block_bytes] uint8, a view."""
        segment, place = divmod(index, self._segment_bytes // self.block_bytes)
        if segment not in self._segments:
            self._segments[segment] = torch.empty(
                self._segment_bytes, dtype=torch.uint8, pin_memory=self._pinned
            )
        return self._segments[segment].narrow(0, place * self.block_bytes, self.block_bytes)

    def buffer(self, index: int) -> memoryview:
        """The same memory, for reading and writing files."""
        return self[index].numpy().data

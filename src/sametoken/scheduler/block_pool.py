"""Who owns which KV block."""

from __future__ import annotations

from collections.abc import Sequence

from sametoken.errors import InvariantError
from sametoken.scheduler.prefix_cache import PrefixCache


class BlockPool:
    """Blocks are free, referenced by one or more slots, or cached and referenced by none.

    Cached blocks that nobody references are given away, least recently used first, once no
    block is free.
    """

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self._prefix_cache = prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        # Keys only; a dict because it keeps the order in which blocks fell out of use.
        self._unused: dict[int, None] = {}

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give."""
        return len(self._free) + len(self._unused)

    @property
    def num_referenced(self) -> int:
        """Blocks that some slot holds."""
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        """How many slots hold a block."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Blocks for one owner, their old contents lost.

        Raises:
            InvariantError: fewer than ``count`` are available.
        """
        if count > self.num_available:
            raise InvariantError(f"{count} blocks asked for, {self.num_available} available")
        taken = [self._take() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Give cached blocks one more owner, who may only read them."""
        for block in blocks:
            if not self._references[block]:
                del self._unused[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one owner away from each block of a block table.

        Raises:
            InvariantError: a block has no owner.
        """
        # Back to front: a chain of cached blocks is then evicted from its far end.
        for block in reversed(blocks):
            if not self._references[block]:
                raise InvariantError(f"block {block} was released twice")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._prefix_cache:
                self._unused[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Hold the pool against every block table in use.

        Raises:
            InvariantError: a block leaked, is owned twice, or is lost to the index.
        """
        held = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                held[block] += 1
        if held != self._references:
            raise InvariantError("block tables and reference counts differ")
        idle = sorted([*self._free, *self._unused])
        if idle != [block for block, count in enumerate(held) if not count]:
            raise InvariantError("a block is neither held nor available, or both")
        for block in self._unused:
            if block not in self._prefix_cache:
                raise InvariantError(f"block {block} is kept for a prefix that is not indexed")
        for block in self._free:
            if block in self._prefix_cache:
                raise InvariantError(f"free block {block} is still indexed")

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block = next(iter(self._unused))
        del self._unused[block]
        self._prefix_cache.forget(block)
        return block

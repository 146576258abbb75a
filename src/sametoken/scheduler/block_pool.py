"""The pool of KV blocks with reference counts, and the prefix cache that indexes them."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from sametoken.errors import InvariantError


class BlockPool:
    """Blocks are free, referenced by one or more slots, or cached and unreferenced.

    Once no block is free, unreferenced cached blocks are evicted, least recently used first.

    Attributes:
        prefix_cache: the index of cached blocks.
        evicted: keys and blocks that ``allocate`` has evicted, until the caller clears it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = PrefixCache()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        # An ordered set: LRU order of the cached blocks without references. A plain dict would
        # look past all that were evicted before to find its first entry.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self.evicted: list[tuple[bytes, int]] = []

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can return."""
        return len(self._free) + len(self._unused)

    @property
    def num_referenced(self) -> int:
        """Blocks that a slot holds."""
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        """The number of slots that hold a block."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks for one owner; their contents are lost.

        Raises:
            InvariantError: fewer than ``count`` are available.
        """
        if count > self.num_available:
            raise InvariantError(f"{count} blocks requested, {self.num_available} available")
        taken = [self._take() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner, which may only read, to cached blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._unused[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block of a block table.

        Raises:
            InvariantError: a block has no owner.
        """
        # In reverse, so that a chain of cached blocks is evicted from its end.
        for block in reversed(blocks):
            if not self._references[block]:
                raise InvariantError(f"block {block} was released twice")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self.prefix_cache:
                self._unused[block] = None
            else:
                self._free.append(block)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove these keys from the cache; blocks that slots hold stay theirs."""
        for key in keys:
            for block in self.prefix_cache.match((key,)):
                self.prefix_cache.forget(block)
                if not self._references[block]:
                    del self._unused[block]
                    self._free.append(block)

    def forget_prefixes(self) -> None:
        """Remove every prefix from the cache; blocks that slots hold stay theirs."""
        for block in self.prefix_cache.blocks():
            self.prefix_cache.forget(block)
        self._free.extend(self._unused)
        self._unused.clear()

    def check_integrity(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Check the pool against every block table in use.

        Raises:
            InvariantError: a block leaked, is owned twice, or its index entry is wrong.
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
            if block not in self.prefix_cache:
                raise InvariantError(f"block {block} is kept for a prefix that is not indexed")
        for block in self._free:
            if block in self.prefix_cache:
                raise InvariantError(f"free block {block} is still indexed")

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._unused.popitem(last=False)
        key = self.prefix_cache.forget(block)
        assert key is not None
        self.evicted.append((key, block))
        return block


def block_keys(
    token_ids: Sequence[int], block_size: int, lookahead_tokens: int, root: bytes = b""
) -> tuple[bytes, ...]:
    """Keys of a text's full blocks, in order; each key covers ``root`` and all tokens before it.

    A block's key also covers the ``lookahead_tokens`` tokens after it, because the drafter's
    KV in the block may depend on them. A block without that many tokens after it has no key.
    """
    num_keys = (len(token_ids) - lookahead_tokens) // block_size
    packed = array("q", token_ids)
    keys: list[bytes] = []
    parent = root
    for index in range(num_keys):
        start, end = index * block_size, (index + 1) * block_size + lookahead_tokens
        digest = hashlib.blake2b(parent, digest_size=32)
        digest.update(packed[start:end].tobytes())
        parent = digest.digest()
        keys.append(parent)
    return tuple(keys)


class PrefixCache:
    """An index from block keys to the blocks that hold their KV.

    It owns no blocks: the pool removes an entry when it reuses the block.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def match(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Blocks of the longest prefix of ``keys`` that is cached."""
        # Up to the first None, without a Python loop: waiting prompts are matched in every plan.
        return tuple(iter(map(self._block_of.get, keys).__next__, None))

    def insert(self, key: bytes, block: int) -> None:
        """Add a computed block, unless another block already has its key."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> bytes | None:
        """Remove a block's entry, if any, and return its key."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        return key

    def blocks(self) -> tuple[int, ...]:
        """Every block in the index."""
        return tuple(self._key_of)

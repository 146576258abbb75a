"""Which KV blocks hold which beginnings of a text."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def block_keys(
    token_ids: Sequence[int], block_size: int, lookahead_tokens: int
) -> tuple[bytes, ...]:
    """Keys of the full blocks of a text, in order; each one covers all tokens before it.

    A block's key also covers the ``lookahead_tokens`` tokens after it, because the drafter's
    KV in the block may depend on them. Where the text ends before those, the KV depends on
    tokens that are not known, and the block has no key.
    """
    num_keys = max(0, len(token_ids) - lookahead_tokens) // block_size
    packed = array("q", token_ids)
    keys: list[bytes] = []
    parent = b""
    for index in range(num_keys):
        start, end = index * block_size, (index + 1) * block_size + lookahead_tokens
        digest = hashlib.blake2b(parent, digest_size=32)
        digest.update(packed[start:end].tobytes())
        parent = digest.digest()
        keys.append(parent)
    return tuple(keys)


class PrefixCache:
    """An index from block keys to the blocks that hold their KV.

    It owns no blocks: the pool forgets an entry when it hands the block to somebody else.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Blocks of the longest leading run of keys that is held."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def insert(self, key: bytes, block: int) -> None:
        """Enter a computed block, unless its key is already held by another block."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> None:
        """Drop a block's entry, if it has one."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def blocks(self) -> tuple[int, ...]:
        """Every block in the index."""
        return tuple(self._key_of)

"""Sizes and counts as people read them."""

from __future__ import annotations

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_K = 1024


def in_units(num_bytes: int) -> str:
    """Format bytes in the largest binary unit that is at least 1."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 step, 2 steps."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_tokens(count: int) -> str:
    """Format a number of tokens; whole multiples of 1024 as K, which options read so."""
    return f"{count} tokens" if count % _K or not count else f"{count // _K}K tokens"

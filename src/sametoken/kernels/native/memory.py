"""Memory for packed weights in large pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ALIGNMENT = 64


class WeightMemory:
    """Cuts weights from slabs of ``slab_bytes``.

    A weight of a megabyte cannot fill a large page of its own, and streaming it through
    small pages is about a third slower. A slab's untouched rest takes no memory.

    Args:
        prefer_large_pages: ``(address, bytes)``, called on each fresh slab.
        slab_bytes: size of a slab; larger weights get one of their own.
    """

    def __init__(
        self, prefer_large_pages: Callable[[int, int], None], slab_bytes: int = 1 << 26
    ) -> None:
        self._prefer_large_pages = prefer_large_pages
        self._slab_bytes = slab_bytes
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """``size`` bytes, aligned to 64, not initialised."""
        if self._used + size > self._slab.numel():
            self._slab = torch.empty(max(size, self._slab_bytes), dtype=torch.uint8)
            self._prefer_large_pages(self._slab.data_ptr(), self._slab.numel())
            self._used = 0
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._slab[start : start + size]

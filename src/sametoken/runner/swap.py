"""KV of preempted requests in host memory."""

from __future__ import annotations

from torch import Tensor

from sametoken.core.plan import StepPlan, SwapIn, SwapOut
from sametoken.state.kv_cache import KVCache
from sametoken.state.upload import to_device, to_host, upload


class SwapStore:
    """Moves a slot's blocks out of and back into every KV cache, in stream order."""

    def __init__(self, caches: tuple[KVCache, ...]) -> None:
        self._caches = caches
        self._saved: dict[str, list[Tensor]] = {}

    def move_out(self, plan: StepPlan) -> None:
        """Apply a plan's swap-outs, then forget the KV of requests that ended meanwhile."""
        for swap in plan.swap_outs:
            self._save(swap)
        for key in plan.discarded_swaps:
            self._saved.pop(key)

    def move_in(self, plan: StepPlan) -> None:
        """Apply a plan's swap-ins."""
        for swap in plan.swap_ins:
            self._restore(swap)

    def _save(self, swap: SwapOut) -> None:
        self._saved[swap.key] = [
            to_host(cache.read_blocks(upload(swap.block_ids, cache.memory.device)))
            for cache in self._caches
        ]

    def _restore(self, swap: SwapIn) -> None:
        for cache, saved in zip(self._caches, self._saved.pop(swap.key), strict=True):
            device = cache.memory.device
            cache.write_blocks(upload(swap.block_ids, device), to_device(saved, device))

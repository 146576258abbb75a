"""Swap space: blocks of preempted requests in host memory."""

from __future__ import annotations

from torch import Tensor

from sametoken.state.caches import ModelCache
from sametoken.state.upload import to_device, to_host, upload
from sametoken.types.plan import StepPlan, SwapIn, SwapOut


class SwapStore:
    """Swaps a slot's blocks out of and into every cache, in stream order.

    State kept by slot is not moved: a preempted request keeps its slot.
    """

    def __init__(self, caches: tuple[ModelCache, ...]) -> None:
        self._memory = tuple(tensor for cache in caches for tensor in cache.blocks)
        self._saved: dict[str, list[Tensor]] = {}

    def move_out(self, plan: StepPlan) -> None:
        """Apply a plan's swap-outs, then drop the blocks of requests that have ended."""
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
            to_host(memory.index_select(1, upload(swap.block_ids, memory.device)))
            for memory in self._memory
        ]

    def _restore(self, swap: SwapIn) -> None:
        for memory, saved in zip(self._memory, self._saved.pop(swap.key), strict=True):
            block_ids = upload(swap.block_ids, memory.device)
            memory.index_copy_(1, block_ids, to_device(saved, memory.device))

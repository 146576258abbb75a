"""Recurrent states kept for prefix caching: copies out of slots and back into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.model.recurrent.rule import Folded
from sametoken.state.caches import ModelCache
from sametoken.types.plan import StateCopy, StepPlan


@dataclass(frozen=True, slots=True)
class CacheStates:
    """The kept states of one cache.

    A kept state is a copy of a slot's memory: the state folded up to some position, and the
    pending rows from there on. The first pass from the kept position on runs those below it, as
    after any window, so its bits are those of the request that left it.

    Attributes:
        slots: the slots' tensors [n, S, ...].
        folded: how far the slots are folded.
        kept: [n, N + 1, ...] for each of ``slots``; the last state takes what is not kept.
        folded_positions: [N + 1] int64, how far each kept state is folded.
    """

    slots: tuple[Tensor, ...]
    folded: Folded
    kept: tuple[Tensor, ...]
    folded_positions: Tensor

    @classmethod
    def allocate(cls, cache: ModelCache, folded: Folded, num_states: int) -> CacheStates:
        """Memory for N = ``num_states`` states beside a cache's slots."""
        kept = tuple(
            slots.new_empty(slots.shape[0], num_states + 1, *slots.shape[2:])
            for slots in cache.slots
        )
        return cls(cache.slots, folded, kept, folded.position.new_zeros(num_states + 1))

    def keep(self, copy: StateCopy, num_computed: Tensor) -> None:
        """Copy a slot's memory, if the step before took the slot to the copy's position or past it.

        Args:
            copy: what to keep.
            num_computed: [S] int64, computed positions after the step.
        """
        own = slice(copy.slot, copy.slot + 1)
        folded = self.folded.position[own]
        passed = (folded <= copy.position) & (copy.position <= num_computed[own])
        # Decided on the device, which alone knows how many drafts were accepted.
        state = torch.where(passed, copy.state, self.folded_positions.shape[0] - 1)
        for slots, kept in zip(self.slots, self.kept, strict=True):
            kept.index_copy_(1, state, slots[:, own])
        self.folded_positions.index_copy_(0, state, folded)

    def restore(self, copy: StateCopy) -> None:
        """Copy a kept state into a slot, whose next row is at the copy's position."""
        for slots, kept in zip(self.slots, self.kept, strict=True):
            slots[:, copy.slot].copy_(kept[:, copy.state])
        folded = self.folded_positions[copy.state]
        self.folded.position[copy.slot].copy_(folded)
        self.folded.num_pending[copy.slot].copy_(copy.position - folded)


class KeptStateStore:
    """Applies the state copies of plans to every cache with recurrent layers, in stream order.

    Args:
        caches: the caches of the target and of the drafter.
        num_states: N, the states that can be kept.
    """

    def __init__(self, caches: tuple[ModelCache, ...], num_states: int) -> None:
        self.caches = tuple(
            CacheStates.allocate(cache, cache.folded, num_states)
            for cache in caches
            if cache.folded is not None and num_states
        )

    def restore(self, plan: StepPlan) -> None:
        """Apply what a plan restores, before its rows run."""
        for copy in plan.restored_states:
            for cache in self.caches:
                cache.restore(copy)

    def keep(self, plan: StepPlan, num_computed: Tensor) -> None:
        """Apply what a plan keeps, after its rows have run; arguments as ``CacheStates.keep``."""
        for copy in plan.kept_states:
            for cache in self.caches:
                cache.keep(copy, num_computed)

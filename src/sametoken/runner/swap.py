"""Swap space on the device's side: copies of KV blocks to host memory and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sametoken.state.caches import ModelCache
from sametoken.state.host_blocks import HostBlocks
from sametoken.state.upload import upload
from sametoken.types.plan import StepPlan, SwapIn, SwapOut

#: Bounds the device memory of blocks that are gathered for one copy.
PIECE_BYTES = 2**27


class SwapStore:
    """Copies blocks of every cache to host blocks and back, in stream order.

    A host block holds a block's bytes of all layers, one cache tensor after the other. State kept
    by slot is not moved: a preempted request keeps its slot.

    Args:
        caches: the caches of the target and of the drafter.
        limit: bytes of host memory, at most.
        pinned: whether the caches are on a GPU.

    Attributes:
        host: the host blocks.
    """

    def __init__(self, caches: tuple[ModelCache, ...], limit: int, *, pinned: bool) -> None:
        self._memory = tuple(_movable(tensor) for cache in caches for tensor in cache.blocks)
        self._widths = [memory[:, 0].nbytes for memory in self._memory]
        self.host = HostBlocks(limit, max(sum(self._widths), 1), pinned=pinned)
        self._piece = max(1, PIECE_BYTES // self.host.block_bytes)

    def move_out(self, plan: StepPlan) -> None:
        """Apply a plan's swap-outs."""
        for swap in plan.swap_outs:
            self._save(swap)

    def move_in(self, plan: StepPlan) -> None:
        """Apply a plan's swap-ins."""
        for swap in plan.swap_ins:
            self._restore(swap)

    def _save(self, swap: SwapOut) -> None:
        for block_ids, host_blocks in self._pieces(swap):
            parts = [
                memory.index_select(1, upload(block_ids, memory.device))
                .transpose(0, 1)
                .reshape(len(block_ids), -1)
                .view(torch.uint8)
                for memory in self._memory
            ]
            for packed, host_block in zip(torch.cat(parts, dim=1), host_blocks, strict=True):
                self.host[host_block].copy_(packed, non_blocking=True)

    def _restore(self, swap: SwapIn) -> None:
        for block_ids, host_blocks in self._pieces(swap):
            device = self._memory[0].device
            size = (len(block_ids), self.host.block_bytes)
            packed = torch.empty(size, dtype=torch.uint8, device=device)
            for row, host_block in zip(packed, host_blocks, strict=True):
                row.copy_(self.host[host_block], non_blocking=True)
            parts = torch.split(packed, self._widths, dim=1)
            for memory, part in zip(self._memory, parts, strict=True):
                self._scatter(memory, block_ids, part)

    @staticmethod
    def _scatter(memory: Tensor, block_ids: tuple[int, ...], part: Tensor) -> None:
        """Copy [m, bytes] uint8 to m blocks of ``memory`` [n, num_blocks, ...]."""
        shape = (len(block_ids), memory.shape[0], *memory.shape[2:])
        values = part.contiguous().view(memory.dtype).view(shape).transpose(0, 1)
        memory.index_copy_(1, upload(block_ids, memory.device), values)

    def _pieces(self, swap: SwapOut | SwapIn) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """A swap's blocks and host blocks, as many at a time as are gathered for one copy."""
        if not self._memory:
            return
        for first in range(0, len(swap.block_ids), self._piece):
            piece = slice(first, first + self._piece)
            yield swap.block_ids[piece], swap.host_blocks[piece]


def _movable(memory: Tensor) -> Tensor:
    """A view that torch can index: float8 as bytes."""
    return memory.view(torch.uint8) if memory.dtype == torch.float8_e4m3fn else memory

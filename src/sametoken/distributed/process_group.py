"""Ranks as processes of one machine, joined by torch.distributed: NCCL, or gloo on a CPU.

The groups are objects of their own, not torch's global one, so that a process may hold the
ranks of several engines. Only bytes travel: no library ever adds.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, FileStore, Store

from sametoken.errors import SametokenError

# Joining has an end. A collective may wait as long as the host has nothing to do, since the
# death of a rank is noticed elsewhere (engine.ranks).
_JOIN = timedelta(minutes=5)
_FOR_EVER = timedelta(days=20)


class ProcessGroup:
    """``TensorParallel`` over processes.

    Args:
        rank, size: as in the protocol.
        device: of the tensors; a CUDA device must be the current one.
        directory: a folder of the ranks alone, in which they find each other.
    """

    def __init__(self, rank: int, size: int, device: torch.device, directory: Path) -> None:
        self.rank = rank
        self.size = size
        store = FileStore(str(directory / "ranks"), size)
        self._on_gpu = device.type == "cuda"
        self._group = (_nccl if self._on_gpu else _gloo)(store, rank, size)
        # A library connects on first use, which must not fall into a capture.
        self.gather(torch.zeros(1, device=device))
        self._group._set_default_timeout(_FOR_EVER)

    def gather(self, x: Tensor) -> Tensor:
        """[...] of every rank to [size, ...] in rank order."""
        out = x.new_empty((self.size, *x.shape))
        if x.numel():
            options = AllgatherOptions()
            options.asyncOp = False
            self._finish(self._group._allgather_base(_bytes(out), _bytes(x), options))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, in memory of its own."""
        out = x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            options = BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            options.asyncOp = False
            self._finish(self._group.broadcast([_bytes(out)], options))
        return out

    def abort(self) -> None:
        """Give up: collectives that other ranks will never join end, with any result."""
        if self._on_gpu:
            self._group.abort()

    @staticmethod
    def _finish(work: Any) -> None:
        """On a CPU wait for the copy; on a GPU order the current stream after it."""
        if work is not None:
            work.wait()


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _gloo(store: Store, rank: int, size: int) -> Any:
    group: Any = torch.distributed.ProcessGroupGloo
    options = group._Options()
    options._timeout = _JOIN
    # The machine's own name may lead nowhere, and nothing leaves the machine.
    options._devices = [group.create_device(hostname="127.0.0.1")]
    return group(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    group: Any = torch.distributed.ProcessGroupNCCL
    options = group.Options()
    options._timeout = _JOIN
    joined = group(store, rank, size, options)
    joined._set_sequence_number_for_group()
    return joined


class Peers(Protocol):
    """The other processes that an engine cannot go on without."""

    def when_lost(self, notice: Callable[[SametokenError], None]) -> None:
        """Have ``notice`` called with the cause, on any thread, once one of them has ended."""
        ...


class NoPeers:
    """Nobody is watched."""

    def when_lost(self, notice: Callable[[SametokenError], None]) -> None:
        """There is nobody whose end could be told."""

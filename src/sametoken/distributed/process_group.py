"""Process groups of torch.distributed on one machine: NCCL, or gloo on a CPU.

They are not torch's global group, so that one process can serve several engines. Collectives
only move bytes: no library adds numbers, so the order of addition is fixed.
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

# Joining times out. A collective may wait as long as the host is idle, because the death of a
# rank is detected elsewhere (distributed.ranks).
_JOIN = timedelta(minutes=5)
_UNLIMITED = timedelta(days=20)


class ProcessGroup:
    """``TensorParallel`` over processes.

    Args:
        rank, size: as in the protocol.
        device: the tensors' device; a CUDA device must be the current one.
        directory: a directory shared by the ranks only, for rendezvous.
    """

    def __init__(self, rank: int, size: int, device: torch.device, directory: Path) -> None:
        self.rank = rank
        self.size = size
        store = FileStore(str(directory / "ranks"), size)
        self._on_gpu = device.type == "cuda"
        self._group = (_nccl if self._on_gpu else _gloo)(store, rank, size)
        # Connect now: NCCL connects on first use, which must not be inside a graph capture.
        self.gather(torch.zeros(1, device=device))
        self._group._set_default_timeout(_UNLIMITED)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: [...] of every rank to [size, ...] in rank order."""
        out = x.new_empty((self.size, *x.shape))
        if x.numel():
            options = AllgatherOptions()
            options.asyncOp = False
            self._finish(self._group._allgather_base(_bytes(out), _bytes(x), options))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, in a new tensor."""
        out = x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            options = BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            options.asyncOp = False
            self._finish(self._group.broadcast([_bytes(out)], options))
        return out

    def abort(self) -> None:
        """End pending collectives that other ranks will never join; their results are invalid."""
        if self._on_gpu:
            self._group.abort()

    @staticmethod
    def _finish(work: Any) -> None:
        """Wait for a collective: on a CPU the host waits, on a GPU the current stream."""
        if work is not None:
            work.wait()


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _gloo(store: Store, rank: int, size: int) -> Any:
    group: Any = torch.distributed.ProcessGroupGloo
    options = group._Options()
    options._timeout = _JOIN
    # Loopback: the hostname may not resolve, and all ranks are on this machine.
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
    """The other processes that an engine depends on."""

    def when_lost(self, notice: Callable[[SametokenError], None]) -> None:
        """Call ``notice`` with the cause, on any thread, once one of them has ended."""
        ...


class NoPeers:
    """No other processes."""

    def when_lost(self, notice: Callable[[SametokenError], None]) -> None:
        """A no-op: there is no process to watch."""

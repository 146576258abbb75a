"""Collectives among the ranks of one machine: on GPUs by kernels or NCCL, sockets on a CPU.

They only move bytes: no library adds numbers, so the order of addition is fixed.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from io import FileIO
from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.errors import SametokenError
from sametoken.layers.parallel import TensorParallel
from sametoken.ops.flat_memory import flat_memory

_logger = logging.getLogger(__name__)

_distributed: Any = torch.distributed

# Joining times out. A collective may wait as long as the host is idle, because the death of a
# rank is detected elsewhere (distributed.ranks).
_JOIN = timedelta(minutes=5)
_UNLIMITED = timedelta(days=20)
_ENDED = "another rank has ended"

#: A socket on a CPU, a file in memory on GPUs.
Opened = socket.socket | FileIO


class ProcessGroup(TensorParallel, Protocol):
    """``TensorParallel`` over processes."""

    def abort(self) -> None:
        """End pending collectives that other ranks will never join; their results are invalid."""
        ...


def meeting(size: int, device: torch.device) -> tuple[list[Opened], list[Opened]]:
    """Open files by which ranks meet: rank 0's own, and one for each other rank to inherit.

    None has a name, so nothing is left behind however a rank ends.
    """
    if _is_gpu(device):
        store = os.memfd_create("sametoken-ranks")
        copies = [os.dup(store) for _ in range(1, size)]
        return [inherited(store, device)], [inherited(copy, device) for copy in copies]
    pairs = [socket.socketpair() for _ in range(1, size)]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


def inherited(fd: int, device: torch.device) -> Opened:
    """The file that this rank has inherited."""
    return FileIO(fd) if _is_gpu(device) else socket.socket(fileno=fd)


def join(
    rank: int, size: int, device: torch.device, files: Sequence[Any], *, by_kernels: bool = False
) -> ProcessGroup:
    """Meet the other ranks.

    Args:
        rank, size: as in ``TensorParallel``.
        device: the tensors' device; a CUDA device must be the current one.
        files: rank 0's of ``meeting``, or the one that another rank has inherited.
        by_kernels: on GPUs that reach each other's memory, not by NCCL.
    """
    if not _is_gpu(device):
        return SocketGroup(rank, size, files)
    (file,) = files
    store = store_in(file, size)
    return (by_kernels and _by_kernels(rank, size, store)) or NcclGroup(rank, size, store, file)


def _by_kernels(rank: int, size: int, store: Any) -> ProcessGroup | None:
    # They are Triton's, which a CPU's ranks do not import.
    from sametoken.distributed.peer_group import peer_group

    group = peer_group(rank, size, store)
    if group is None:
        _logger.warning("GPUs do not reach each other's memory: NCCL copies between them")
    return group


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


class SocketGroup(ProcessGroup):
    """Ranks on a CPU: rank 0 has a socket to each of the others and passes on what they send.

    Args:
        rank, size: as in ``join``.
        sockets: of rank 0 one for each other rank, in rank order; of others that to rank 0.

    Raises:
        RuntimeError: in a collective, another rank has ended.
    """

    def __init__(self, rank: int, size: int, sockets: Sequence[socket.socket]) -> None:
        self.rank, self.size = rank, size
        self._sockets = sockets
        weakref.finalize(self, _close, sockets)

    def gather(self, x: Tensor) -> Tensor:
        """See ``TensorParallel``."""
        out = x.new_empty((self.size, *x.shape))
        if not x.numel():
            return out
        if self.rank:
            _send(self._sockets[0], _bytes(x))
            _receive(self._sockets[0], _bytes(out))
            return out
        out[0] = x
        for other, sock in enumerate(self._sockets, start=1):
            _receive(sock, _bytes(out[other]))
        for sock in self._sockets:
            _send(sock, _bytes(out))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """See ``TensorParallel``."""
        out = x.clone(memory_format=torch.contiguous_format)
        if x.numel() and self.rank:
            _receive(self._sockets[0], _bytes(out))
        elif x.numel():
            for sock in self._sockets:
                _send(sock, _bytes(out))
        return out

    def abort(self) -> None:
        """A no-op: the kernel closes a dead rank's sockets, at which collectives end."""


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _bytes(x: Tensor) -> Tensor:
    """The memory of a tensor, [n] uint8; of a copy if it is not contiguous."""
    return flat_memory(x.contiguous())


def _send(sock: socket.socket, data: Tensor) -> None:
    try:
        sock.sendall(data.numpy().data)
    except OSError as error:
        raise RuntimeError(_ENDED) from error


def _receive(sock: socket.socket, data: Tensor) -> None:
    into = data.numpy().data
    while into:
        try:
            count = sock.recv_into(into)
        except OSError as error:
            raise RuntimeError(_ENDED) from error
        if not count:
            raise RuntimeError(_ENDED)
        into = into[count:]


def store_in(file: FileIO, size: int) -> Any:
    """A store of ``size`` ranks, in a file that was empty and that all of them have open."""
    return _distributed.FileStore(f"/proc/self/fd/{file.fileno()}", size)


class NcclGroup(ProcessGroup):
    """Ranks on GPUs. Not torch's global group, so that one process can serve several engines.

    Args:
        rank, size: as in ``join``.
        store, file: in which ranks find each other, and where it is.
    """

    def __init__(self, rank: int, size: int, store: Any, file: FileIO) -> None:
        self.rank, self.size = rank, size
        # The store opens it again at each use.
        self._file = file
        options = _distributed.ProcessGroupNCCL.Options()
        options._timeout = _JOIN
        self._group = _distributed.ProcessGroupNCCL(store, rank, size, options)
        self._group._set_sequence_number_for_group()
        self._gathered = _distributed.distributed_c10d.AllgatherOptions()
        self._sent = _distributed.BroadcastOptions()
        self._sent.rootRank = self._sent.rootTensor = 0
        # On the current stream, in its order.
        self._gathered.asyncOp = self._sent.asyncOp = False
        # Connect now: NCCL connects on first use, which must not be inside a graph capture.
        self.gather(torch.zeros(1, dtype=torch.float32, device="cuda"))
        self._group._set_default_timeout(_UNLIMITED)

    def gather(self, x: Tensor) -> Tensor:
        """See ``TensorParallel``."""
        out = x.new_empty((self.size, *x.shape))
        if x.numel():
            self._finish(self._group._allgather_base(_bytes(out), _bytes(x), self._gathered))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """See ``TensorParallel``."""
        out = x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            self._finish(self._group.broadcast([_bytes(out)], self._sent))
        return out

    def abort(self) -> None:
        """See ``ProcessGroup``."""
        self._group.abort()

    @staticmethod
    def _finish(work: Any) -> None:
        """The current stream waits for a collective; the host does not."""
        if work is not None:
            work.wait()


class Peers(Protocol):
    """The other processes that an engine depends on."""

    def when_lost(self, notice: Callable[[SametokenError], None]) -> None:
        """Call ``notice`` with the cause, on any thread, once one of them has ended."""
        ...


class NoPeers:
    """No other processes."""

    def when_lost(self, notice: Callable[[SametokenError], None]) -> None:
        """A no-op: there is no process to watch."""

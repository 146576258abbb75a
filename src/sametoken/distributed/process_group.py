"""Collectives among the ranks of one machine: NCCL on GPUs, sockets on a CPU.

They only move bytes: no library adds numbers, so the order of addition is fixed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.errors import SametokenError

# Joining times out. A collective may wait as long as the host is idle, because the death of a
# rank is detected elsewhere (distributed.ranks).
_JOIN = timedelta(minutes=5)
_UNLIMITED = timedelta(days=20)
_RETRY_S = 0.01
_ENDED = "another rank has ended"


class ProcessGroup(Protocol):
    """``TensorParallel`` over processes."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: [...] of every rank to [size, ...] in rank order."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, in a new tensor."""
        ...

    def abort(self) -> None:
        """End pending collectives that other ranks will never join; their results are invalid."""
        ...


def join(rank: int, size: int, device: torch.device, directory: Path) -> ProcessGroup:
    """Meet the other ranks.

    Args:
        rank, size: as in ``TensorParallel``.
        device: the tensors' device; a CUDA device must be the current one.
        directory: a directory shared by the ranks only, for rendezvous.
    """
    group = NcclGroup if device.type == "cuda" else SocketGroup
    return group(rank, size, directory)


class SocketGroup:
    """Ranks on a CPU: rank 0 has a socket to each of the others and passes on what they send.

    Args:
        rank, size, directory: as in ``join``.

    Raises:
        RuntimeError: in a collective, another rank has ended; OSError: it never came.
    """

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        self.rank, self.size = rank, size
        with _address(directory) as address:
            #: Of rank 0 one for each other rank, in rank order; of others that to rank 0.
            self._sockets = _accepted(address, size) if rank == 0 else [_connected(address, rank)]

    def gather(self, x: Tensor) -> Tensor:
        """See ``ProcessGroup``."""
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
        """See ``ProcessGroup``."""
        out = x.clone(memory_format=torch.contiguous_format)
        if x.numel() and self.rank:
            _receive(self._sockets[0], _bytes(out))
        elif x.numel():
            for sock in self._sockets:
                _send(sock, _bytes(out))
        return out

    def abort(self) -> None:
        """A no-op: the kernel closes a dead rank's sockets, at which collectives end."""


def _bytes(x: Tensor) -> memoryview:
    """The memory of a tensor; of a copy if it is not contiguous."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().data


def _send(sock: socket.socket, data: memoryview) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise RuntimeError(_ENDED) from error


def _receive(sock: socket.socket, into: memoryview) -> None:
    while into:
        try:
            count = sock.recv_into(into)
        except OSError as error:
            raise RuntimeError(_ENDED) from error
        if not count:
            raise RuntimeError(_ENDED)
        into = into[count:]


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    # Through the open directory, for the path of a Unix socket has at most 107 bytes.
    opened = os.open(directory, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{opened}/ranks"
    finally:
        os.close(opened)


def _accepted(address: str, size: int) -> list[socket.socket]:
    found: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(_JOIN.total_seconds())
        listener.bind(address)
        listener.listen(size)
        while len(found) < size - 1:
            sock, _ = listener.accept()
            sock.setblocking(True)
            found[sock.recv(1)[0]] = sock
    return [found[rank] for rank in sorted(found)]


def _connected(address: str, rank: int) -> socket.socket:
    deadline = time.monotonic() + _JOIN.total_seconds()
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            sock.sendall(bytes([rank]))
            return sock


class NcclGroup:
    """Ranks on GPUs. Not torch's global group, so that one process can serve several engines.

    Args:
        rank, size, directory: as in ``join``.
    """

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        self.rank, self.size = rank, size
        distributed: Any = torch.distributed
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = _JOIN
        store = distributed.FileStore(str(directory / "ranks"), size)
        self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
        self._group._set_sequence_number_for_group()
        self._gathered = distributed.distributed_c10d.AllgatherOptions()
        self._sent = distributed.BroadcastOptions()
        self._sent.rootRank = self._sent.rootTensor = 0
        # On the current stream, in its order.
        self._gathered.asyncOp = self._sent.asyncOp = False
        # Connect now: NCCL connects on first use, which must not be inside a graph capture.
        self.gather(torch.zeros(1, device="cuda"))
        self._group._set_default_timeout(_UNLIMITED)

    def gather(self, x: Tensor) -> Tensor:
        """See ``ProcessGroup``."""
        out = x.new_empty((self.size, *x.shape))
        if x.numel():
            flat = (one.contiguous().view(-1).view(torch.uint8) for one in (out, x))
            self._finish(self._group._allgather_base(*flat, self._gathered))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """See ``ProcessGroup``."""
        out = x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            self._finish(self._group.broadcast([out.view(-1).view(torch.uint8)], self._sent))
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

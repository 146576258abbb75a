"""Ranks whose GPUs write into each other's memory, as NVLink lets them (``ops.peers``).

Buffers are allocated and opened by CUDA's driver, not by torch: what another rank still writes
after a failure must not reach memory that torch has given to somebody else.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sametoken.distributed.process_group import ProcessGroup
from sametoken.ops.backend import Kernels
from sametoken.ops.model import peers_triton
from sametoken.ops.peers import MOST_CHANNELS, PeerBuffers, buffer_bytes

# Of cuda.h.
_NATIVE_ATOMICS, _LAZY_ACCESS = 3, 1
_HANDLE_BYTES = 64
#: Seconds that the first exchanges may take, kernels' compilation included.
_PATIENCE_S = 60.0
#: fp32 of the first exchanges: many channels, one and several blocks of each.
_TRIED = (1000, 600_000, 3_000_000)


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


class PeerGroup(ProcessGroup):
    """``ProcessGroup`` by kernels that write into the memory of the other ranks.

    Args:
        peers: the buffers of all ranks.
        buffers: the same, kept while this is.
    """

    def __init__(self, peers: PeerBuffers, buffers: Sequence[_Buffer]) -> None:
        self.rank, self.size = peers.rank, peers.size
        self._peers, self._buffers = peers, buffers

    def gather(self, x: Tensor) -> Tensor:
        """See ``TensorParallel``."""
        return peers_triton.gather(x, self._peers)

    def broadcast(self, x: Tensor) -> Tensor:
        """See ``TensorParallel``."""
        return self.gather(x)[0]

    def sum(
        self, kernels: Kernels, partial: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """See ``TensorParallel``."""
        return peers_triton.partial_sum(partial, self._peers, dtype, bias)

    def abort(self) -> None:
        """See ``ProcessGroup``."""
        self._peers.stopped.fill_(1)


def peer_group(rank: int, size: int, store: Any) -> PeerGroup | None:
    """The ranks as a ``PeerGroup``; None: a GPU does not reach another one's memory.

    Args:
        rank, size: as in ``TensorParallel``; each rank's GPU has its number.
        store: in which ranks find what others have set, before it times out.
    """
    agreed = _Agreement(rank, size, store)
    own = _allocate(buffer_bytes(size, MOST_CHANNELS))
    handles = agreed.of_all("buffer", _handle(own) if _reaches_all(rank, size) else b"")
    if not all(handles):
        return None
    buffers = [own if other == rank else _open(one) for other, one in enumerate(handles)]
    if not agreed.by_all("opened", all(one.at for one in buffers)):
        return None
    counts = torch.zeros(MOST_CHANNELS, dtype=torch.int32, device="cuda")
    stopped = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    group = PeerGroup(PeerBuffers(rank, tuple(one.at for one in buffers), counts, stopped), buffers)
    return group if agreed.by_all("exchanged", _exchanges_rightly(group)) else None


def _exchanges_rightly(group: PeerGroup) -> bool:
    """Whether numbers that all ranks know arrive, in time."""
    for length in _TRIED:
        known = torch.arange(length * group.size, device="cuda").view(group.size, length)
        found = group.gather(known[group.rank].float())
        event = torch.cuda.current_stream().record_event()
        deadline = time.monotonic() + _PATIENCE_S
        while not event.query():
            if time.monotonic() > deadline:
                group.abort()
            time.sleep(0.001)
        if not torch.equal(found, known.float()):
            return False
    return True


class _Agreement:
    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size, self._store = rank, size, store

    def of_all(self, key: str, value: bytes) -> Sequence[bytes]:
        """What every rank gives, in rank order."""
        self._store.set(f"{key} {self._rank}", value)
        return [self._store.get(f"{key} {rank}") for rank in range(self._size)]

    def by_all(self, key: str, value: bool) -> bool:
        return all(one == b"1" for one in self.of_all(key, b"1" if value else b"0"))


class _Buffer:
    """Memory that CUDA's driver has allocated or opened, given back with this object.

    Args:
        at: its address; 0: there is none.
        release: the driver's function that gives it back.
    """

    def __init__(self, at: int, release: str) -> None:
        self.at = at
        if at:
            device = torch.cuda.current_device()
            # At its end the process gives back all.
            weakref.finalize(self, _release, device, release, at).atexit = False


def _allocate(nbytes: int) -> _Buffer:
    """Zeroed memory of the current GPU.

    Raises:
        RuntimeError: there is not enough.
    """
    _make_context_current(torch.cuda.current_device())
    at = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(nbytes))
    _call("cuMemsetD8_v2", at, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
    torch.cuda.synchronize()
    return _Buffer(at.value, "cuMemFree_v2")


def _handle(buffer: _Buffer) -> bytes:
    """By which other processes open it; b"": they cannot."""
    handle = _Handle()
    failed = _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(buffer.at))
    return b"" if failed else bytes(handle)


def _open(handle: bytes) -> _Buffer:
    """Another rank's buffer, at another address; at 0 if it cannot be opened."""
    at = ctypes.c_uint64()
    args = (ctypes.byref(at), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_ACCESS))
    failed = _driver().cuIpcOpenMemHandle_v2(*args)
    return _Buffer(0 if failed else at.value, "cuIpcCloseMemHandle")


def _release(device: int, function: str, at: int) -> None:
    with torch.cuda.device(device):
        _make_context_current(device)
        getattr(_driver(), function)(ctypes.c_uint64(at))


def _make_context_current(device: int) -> None:
    """For calls of the driver on this thread; as any call of CUDA's runtime does."""
    torch.cuda.mem_get_info(device)


def _reaches_all(rank: int, size: int) -> bool:
    return all(_reaches(rank, other) for other in range(size) if other != rank)


def _reaches(device: int, other: int) -> bool:
    """Whether a GPU has atomic operations on another one's memory, as flags are raised by."""
    found = ctypes.c_int()
    args = (ctypes.byref(found), _NATIVE_ATOMICS, device, other)
    return not _driver().cuDeviceGetP2PAttribute(*args) and bool(found.value)


def _call(name: str, *args: Any) -> None:
    function: Callable[..., int] = getattr(_driver(), name)
    if failed := function(*args):
        raise RuntimeError(f"CUDA's {name}: error {failed}")


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")

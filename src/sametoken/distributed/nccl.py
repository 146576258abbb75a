"""NCCL between a trainer and its engines, with the handshake of vLLM's trainers.

Rank 0 makes a unique id. vLLM's trainers put it into a ``TCPStore``, pickled, under
``broadcast_from/0/0``, or send it with the request to join. All ranks then join, and add one
number together before the first broadcast.
"""

from __future__ import annotations

import ctypes
import pickletools
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from sametoken.types.weight_updates import NCCL_ID_BYTES

_KEY = "broadcast_from/0/0"
# Of nccl.h.
_IN_PROGRESS, _UINT8, _FLOAT32, _SUM = 7, 1, 7, 0
_POLL_SECONDS = 0.0005
_distributed: Any = torch.distributed


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * NCCL_ID_BYTES),)


class NcclGroup:
    """Broadcasts bytes from rank 0.

    Joining waits as long as NCCL does: it ends if the trainer dies, not if it only hangs.

    Args:
        unique_id: 128 bytes that rank 0 made.
        rank, world_size: of this process; the trainer's rank is 0.
        timeout_s: seconds that a broadcast may take.

    Raises:
        RuntimeError: NCCL is missing or fails.
    """

    def __init__(self, unique_id: bytes, rank: int, world_size: int, timeout_s: float) -> None:
        self.device = _device()
        self._timeout_s = timeout_s
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._nccl = _library()
        self._comm = ctypes.c_void_p()
        at = ctypes.byref(self._comm)
        _check(
            self._nccl.ncclCommInitRank(at, world_size, _UniqueId.from_buffer_copy(unique_id), rank)
        )
        one = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._run(self._nccl.ncclAllReduce, one, _FLOAT32, _SUM)

    def broadcast(self, data: Tensor) -> None:
        """Fill a contiguous uint8 tensor of ``device`` with rank 0's, and wait for it.

        Raises:
            RuntimeError: a rank is gone or too slow; the group has ended.
        """
        self._run(self._nccl.ncclBroadcast, data, _UINT8, 0)

    def _run(self, collective: Any, data: Tensor, dtype: int, last: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        pointer, stream = ctypes.c_void_p(data.data_ptr()), self._stream.cuda_stream
        count = ctypes.c_size_t(data.numel())
        _check(
            collective(pointer, pointer, count, dtype, last, self._comm, ctypes.c_void_p(stream))
        )
        try:
            self._wait()
        except RuntimeError:
            # Otherwise its kernel spins on, and reads memory that is no longer ours.
            self._nccl.ncclCommAbort(self._comm)
            raise

    def _wait(self) -> None:
        done, failed = self._stream.record_event(), ctypes.c_int()
        deadline = time.monotonic() + self._timeout_s
        while not done.query():
            _check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(failed)))
            _check(failed.value)
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL: no answer in {self._timeout_s:g} s")
            time.sleep(_POLL_SECONDS)


def new_unique_id() -> bytes:
    """An id for a new group.

    Raises:
        RuntimeError: NCCL is missing or fails.
    """
    made = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def read_unique_id(address: str, port: int, world_size: int, timeout_s: float) -> bytes:
    """The id from the store that a trainer opens at ``address``.

    Raises:
        RuntimeError: nobody opens one in time, or it has something else.
    """
    # Counted among the workers, whom vLLM's trainers wait for.
    store = _distributed.TCPStore(
        address, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s)
    )
    return _id_in(store.get(_KEY))


def _id_in(pickled: bytes) -> bytes:
    # Its opcodes are read, not run: what was pickled is a structure of 128 bytes.
    try:
        found = [one for _, one, _ in pickletools.genops(pickled) if isinstance(one, bytes)]
    except Exception as error:
        raise RuntimeError(f"the trainer's unique id cannot be read: {error!r}") from error
    if len(found) != 1 or len(found[0]) != NCCL_ID_BYTES:
        raise RuntimeError("the trainer's store has no unique id of NCCL")
    return found[0]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _library() -> Any:
    # torch has loaded it already.
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(f"NCCL is not installed: {error}") from error


def _check(result: int) -> None:
    if result not in (0, _IN_PROGRESS):
        raise RuntimeError(f"NCCL: error {result}; NCCL_DEBUG=WARN says more")

"""The process group of a trainer and the engines that it sends weights to.

Rank 0, the trainer, opens a ``TCPStore`` that the others connect to; over it all of them make one
group. Bytes of tensors alone are exchanged, and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.distributed.nccl import NcclGroup, read_unique_id
from sametoken.errors import WeightUpdateError
from sametoken.ops.flat_memory import flat_memory
from sametoken.types.weight_updates import GLOO, NCCL, Rendezvous

_distributed: Any = torch.distributed


class _Group(Protocol):
    device: torch.device

    def broadcast(self, data: Tensor) -> None: ...


class TrainerGroup:
    """Broadcasts tensors from rank 0. Not torch's global group, which a trainer needs itself.

    Args:
        at: where and as which rank to join.

    Raises:
        WeightUpdateError: the other ranks do not come in time.
    """

    def __init__(self, at: Rendezvous) -> None:
        _require_backend(at.backend)
        self._at = at
        try:
            self._group: _Group = _nccl(at) if at.backend == NCCL else _Gloo(at)
        except RuntimeError as error:
            raise self._lost(error) from error
        self.device = self._group.device

    def pieces(self, num_bytes: Sequence[int], packed_bytes: int | None = None) -> Iterator[range]:
        """Which tensors come in one broadcast, as vLLM's trainers join them.

        Args:
            num_bytes: of each tensor, in order.
            packed_bytes: in place of the rendezvous', for these alone.
        """
        most = self._at.packed_bytes if packed_bytes is None else packed_bytes
        first = total = 0
        for i, one in enumerate(num_bytes):
            total += one
            if total > most:
                yield range(first, i + 1)
                first, total = i + 1, 0
        if first < len(num_bytes):
            yield range(first, len(num_bytes))

    def broadcast(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor of ``device`` with that of rank 0, and wait for it.

        Raises:
            WeightUpdateError: a rank is gone or too slow; the group is of no use any more.
        """
        if not tensor.numel():
            return
        try:
            self._group.broadcast(flat_memory(tensor))
        except RuntimeError as error:
            raise self._lost(error) from error

    def leave(self) -> None:
        """Leave a group that is of no use any more; of gloo, rank 0's port is free then."""
        if isinstance(self._group, _Gloo):
            self._group.leave()

    def _lost(self, error: RuntimeError) -> WeightUpdateError:
        # Without torch's advice, which follows its first sentence.
        first = str(error).partition("\n")[0].partition(". ")[0]
        return WeightUpdateError(
            f"the group {self._at.place} is not whole ({first})",
            "let every rank join it again",
        )


def _require_backend(backend: str) -> None:
    if backend == NCCL and not torch.cuda.is_available():
        raise WeightUpdateError("nccl needs a GPU on both sides", f"use the backend {GLOO!r}")


def _nccl(at: Rendezvous) -> NcclGroup:
    found = at.unique_id or read_unique_id(at.address, at.port, at.world_size, at.timeout_s)
    return NcclGroup(found, at.rank, at.world_size, at.timeout_s)


class _Gloo:
    device = torch.device("cpu")

    def __init__(self, at: Rendezvous) -> None:
        timeout = timedelta(seconds=at.timeout_s)
        store = _distributed.TCPStore(
            at.address,
            at.port,
            at.world_size,
            is_master=at.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
        store = _distributed.PrefixStore("sametoken", store)
        self._group = _distributed.ProcessGroupGloo(store, at.rank, at.world_size, timeout)
        self._from_trainer = _distributed.BroadcastOptions()
        self._from_trainer.rootRank = self._from_trainer.rootTensor = 0

    def broadcast(self, data: Tensor) -> None:
        self._group.broadcast([data], self._from_trainer).wait()

    def leave(self) -> None:
        # The store, which listens, ends with it; an error's frames may hold the rest for longer.
        del self._group

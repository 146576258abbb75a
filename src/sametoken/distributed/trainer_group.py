"""The process group of a trainer and the engines that it sends weights to.

Rank 0, the trainer, opens a ``TCPStore`` that the others connect to; over it all of them make one
of torch's process groups. Bytes of tensors alone are exchanged, and nothing is unpickled.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import WeightUpdateError
from sametoken.types.weight_updates import GLOO, NCCL, Rendezvous

_distributed: Any = torch.distributed


class TrainerGroup:
    """Broadcasts tensors from rank 0. Not torch's global group, which a trainer needs itself.

    NCCL's has not been run.

    Args:
        at: where and as which rank to join.

    Raises:
        WeightUpdateError: the other ranks do not come in time.
    """

    def __init__(self, at: Rendezvous) -> None:
        _require_backend(at.backend)
        self.device = torch.device("cuda" if at.backend == NCCL else "cpu")
        self._at = at
        self._from_trainer = _distributed.BroadcastOptions()
        self._from_trainer.rootRank = self._from_trainer.rootTensor = 0
        try:
            self._group = _joined(at)
        except RuntimeError as error:
            raise self._lost(error) from error

    def broadcast(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor of ``device`` with that of rank 0, and wait for it.

        Raises:
            WeightUpdateError: a rank is gone or too slow; the group is of no use any more.
        """
        if not tensor.numel():
            return
        try:
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], self._from_trainer).wait()
            if self._at.backend == NCCL:
                # The wait is that of a stream; other threads read the tensor on others.
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> WeightUpdateError:
        # Without torch's advice, which follows its first sentence.
        first = str(error).partition("\n")[0].partition(". ")[0]
        return WeightUpdateError(
            f"the group at {self._at.address}:{self._at.port} is not whole ({first})",
            "let every rank join it again",
        )


def _require_backend(backend: str) -> None:
    if backend == NCCL and not torch.cuda.is_available():
        raise WeightUpdateError("nccl needs a GPU on both sides", f"use the backend {GLOO!r}")


def _joined(at: Rendezvous) -> Any:
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
    if at.backend == NCCL:
        options = _distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _distributed.ProcessGroupNCCL(store, at.rank, at.world_size, options)
    return _distributed.ProcessGroupGloo(store, at.rank, at.world_size, timeout)

"""Asynchronous copies to the host, waited for by event."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.state.upload import to_host


@dataclass(frozen=True, slots=True)
class HostCopy:
    """An integer matrix being copied to host memory in stream order."""

    _tensor: Tensor
    _landed: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: Tensor) -> HostCopy:
        """Enqueue the copy."""
        copy, landed = to_host(tensor), None
        if tensor.device.type != "cpu":
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record()
        return cls(copy, landed)

    def rows(self) -> list[list[int]]:
        """Wait for the copy, not for work enqueued after it, and return the rows."""
        if self._landed is not None:
            self._landed.synchronize()
        rows: list[list[int]] = self._tensor.tolist()
        return rows

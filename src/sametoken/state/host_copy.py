"""Values that the host waits for while the device works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.state.upload import to_host


@dataclass(frozen=True, slots=True)
class HostCopy:
    """An integer matrix on its way to host memory, in stream order."""

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
        """Its rows, once the copy has landed; work enqueued after it is not waited for."""
        if self._landed is not None:
            self._landed.synchronize()
        rows: list[list[int]] = self._tensor.tolist()
        return rows

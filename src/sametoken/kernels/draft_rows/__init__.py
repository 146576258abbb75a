"""Where a drafter's rows stand after a commit, at fixed shapes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.kernels.draft_rows import reference
from sametoken.kernels.draft_rows.layout import CatchUp, Chains


class DraftRowKernels(Protocol):
    """Both functions of a captured draft chain, on one device."""

    def catch_up(
        self,
        sequences: Any,
        slots: Tensor,
        start: Tensor,
        end: Tensor,
        samples: Tensor,
        *,
        rows_per_plan_row: int,
        with_newest: bool,
    ) -> CatchUp:
        """Live rows and chains of B plan rows; see ``reference.catch_up``."""
        ...

    def advanced(self, sequences: Any, chains: Chains) -> Chains:
        """The chains one position on; see ``reference.advanced``."""
        ...


def select_draft_rows(device: torch.device) -> DraftRowKernels:
    """The kernels for ``device``."""
    if device.type != "cuda":
        return reference
    # Triton is part of CUDA builds of torch alone.
    from sametoken.kernels.draft_rows import triton

    return triton

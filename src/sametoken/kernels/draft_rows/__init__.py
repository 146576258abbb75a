"""Where a drafter's rows stand after a commit, at fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.kernels.draft_rows import reference
from sametoken.kernels.draft_rows.layout import CatchUp, Chains


class DraftRowKernels(Protocol):
    """The functions of a chain of drafts, on one device."""

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

    def take(self, rows: Tensor, states: Tensor) -> Tensor:
        """Copies of the given rows, [R] int64, of [T, W]."""
        ...

    def stacked(self, tokens: Sequence[Tensor], samples: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts of plan rows that all have a chain; see ``reference.stacked``."""
        ...


def take_rows(states: Tensor, rows: Tensor | None) -> Tensor:
    """Copies of the given rows, [R] int64, of [T, W]; None: all of them, as they are."""
    if rows is None:
        return states
    return select_draft_rows(rows.device).take(rows, states)


def select_draft_rows(device: torch.device) -> DraftRowKernels:
    """The kernels for ``device``."""
    if device.type != "cuda":
        return reference
    # Triton is part of CUDA builds of torch alone.
    from sametoken.kernels.draft_rows import triton

    return triton

"""Steps of requests that choose LoRA adapters, beside those of the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sametoken.models.base import CausalLM, StandIn
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.low_rank import RowAdapters
from sametoken.ops.step.types import TableWrite
from sametoken.types.lora_modules import NO_ADAPTER
from sametoken.types.plan import Admission, StepPlan

if TYPE_CHECKING:
    from sametoken.runner.runner import Launcher


class AdaptedTarget(StandIn):
    """In place of the target: its layers know the adapter of each row of a pass.

    Args:
        target: has room for adapters, or is what records the experts of one that has.
        rows: what its layers read.
        by_slot: see ``AdaptedSteps``.
    """

    def __init__(self, target: CausalLM, rows: RowAdapters, by_slot: Tensor) -> None:
        super().__init__(target)
        self._rows, self._by_slot = rows, by_slot

    @contextmanager
    def around(self, rows: AttentionRows) -> Iterator[None]:
        """See ``StandIn``."""
        self._rows.begin(self._by_slot.index_select(0, rows.slots))
        yield


class StepAdapters(Protocol):
    """The adapters of the slots' requests."""

    def admit(self, admission: Admission) -> list[TableWrite]:
        """What sets a slot's adapter, replacing that of its previous request."""
        ...

    def launcher_of(self, plan: StepPlan, plain: Launcher) -> Launcher:
        """What runs a plan's step: ``plain`` if none of its requests has an adapter."""
        ...


@dataclass(frozen=True, slots=True)
class NoStepAdapters:
    """No request has one."""

    def admit(self, admission: Admission) -> list[TableWrite]:
        """Nothing is to be set."""
        return []

    def launcher_of(self, plan: StepPlan, plain: Launcher) -> Launcher:
        """``plain``."""
        return plain


NO_STEP_ADAPTERS: StepAdapters = NoStepAdapters()


@dataclass(frozen=True, slots=True)
class AdaptedSteps:
    """``StepAdapters`` of an engine with room for adapters.

    Attributes:
        by_slot: [S] int64 on the device, the place of each slot's adapter; 0: it has none.
        places: of the adapters that are there, by the number that requests have.
        launcher: runs steps of an ``AdaptedTarget``.
    """

    by_slot: Tensor
    places: Mapping[int, int]
    launcher: Launcher
    _adapted: set[int] = field(default_factory=set)

    @staticmethod
    def slots(max_num_seqs: int, device: torch.device) -> Tensor:
        """``by_slot`` without any adapter; the last slot is padding."""
        return torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    def admit(self, admission: Admission) -> list[TableWrite]:
        """See ``StepAdapters``."""
        slot, adapter = admission.slot, admission.adapter
        place = NO_ADAPTER if adapter == NO_ADAPTER else self.places[adapter]
        (self._adapted.add if place else self._adapted.discard)(slot)
        return [TableWrite(self.by_slot[slot], place)]

    def launcher_of(self, plan: StepPlan, plain: Launcher) -> Launcher:
        """See ``StepAdapters``; a row without an adapter has equal bits either way."""
        has_adapter = any(scheduled.slot in self._adapted for scheduled in plan.requests)
        return self.launcher if has_adapter else plain

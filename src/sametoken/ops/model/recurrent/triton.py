"""A pass over recurrent state on a GPU: nothing waits for the device, no shape follows data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.gated_delta_rule import triton as gated_delta_rule
from sametoken.ops.model.gated_delta_rule.rule import (
    GatedDelta,
    GatedDeltaParams,
)
from sametoken.ops.model.recurrent.rule import (
    Folded,
    LayerMemory,
    RawRows,
    RecurrentRule,
    RuleWeights,
)
from sametoken.ops.model.recurrent.runs import (
    Runs,
    plan_runs,
)


@dataclass(frozen=True, slots=True)
class TritonPass:
    """``RecurrentPass`` by kernels; captured steps and eager ones run the same."""

    runs: Runs

    @classmethod
    def begin(cls, rows: AttentionRows, folded: Folded) -> TritonPass:
        """Derive what is folded, run and left pending; rows that do not follow give NaN."""
        return cls(plan_runs(rows, folded))

    def run(self, weights: RuleWeights, raw: RawRows, memory: LayerMemory) -> Tensor:
        """As ``RecurrentPass.run``."""
        memory.require_dtype(raw)
        assert isinstance(weights, GatedDeltaParams)
        return gated_delta_rule.advance(self.runs, weights, raw, memory)

    def finish(self) -> None:
        """Nothing is left to do: ``plan_runs`` has written how far slots are folded."""


def require_rule(rule: RecurrentRule) -> None:
    """Refuse a rule that has no Triton kernels.

    Raises:
        UnsupportedError: naming it.
    """
    if not isinstance(rule, GatedDelta):
        raise UnsupportedError(
            f"{type(rule).__name__} has no kernels for a GPU", "use device 'cpu'"
        )

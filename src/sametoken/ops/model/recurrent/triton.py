"""A pass over recurrent state on a GPU, without host synchronization or data-dependent shapes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.gated_delta_rule import triton as gated_delta_rule
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.mamba2 import triton as mamba2
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.model.recurrent.rule import (
    Folded,
    LayerMemory,
    RawRows,
    RecurrentRule,
    RuleWeights,
)
from sametoken.ops.model.recurrent.runs import Runs, plan_runs


@dataclass(frozen=True, slots=True)
class TritonPass:
    """``RecurrentPass`` in Triton, the same in captured and eager steps."""

    runs: Runs

    @classmethod
    def begin(cls, rows: AttentionRows, folded: Folded) -> TritonPass:
        """See ``Kernels.begin_pass``; rows that do not follow the slot's give NaN."""
        return cls(plan_runs(rows, folded))

    def run(self, weights: RuleWeights, raw: RawRows, memory: LayerMemory) -> Tensor:
        """See ``RecurrentPass.run``."""
        memory.require_dtype(raw)
        if isinstance(weights, Mamba2Params):
            return mamba2.advance(self.runs, weights, raw, memory)
        assert isinstance(weights, GatedDeltaParams)
        return gated_delta_rule.advance(self.runs, weights, raw, memory)

    def finish(self) -> None:
        """Do nothing: ``plan_runs`` has updated ``Folded``."""


def require_rule(rule: RecurrentRule) -> None:
    """Refuse a rule that has no Triton kernels.

    Raises:
        UnsupportedError: names the rule.
    """
    if not isinstance(rule, GatedDelta | Mamba2):
        raise UnsupportedError(
            f"{type(rule).__name__} has no kernels for a GPU", "use device 'cpu'"
        )

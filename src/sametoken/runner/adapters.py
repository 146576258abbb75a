"""A target whose requests choose LoRA adapters."""

from __future__ import annotations

from torch import Tensor

from sametoken.models.base import CausalLM, HiddenStates, StandIn
from sametoken.ops.backend import AttentionRows, KeptRows
from sametoken.ops.model.low_rank import RowAdapters
from sametoken.state.caches import ModelCache


class AdaptedTarget(StandIn):
    """A ``CausalLM`` in place of the target: its layers know the adapter of each row of a pass.

    Drafters that share the target's weights read its embedding and head, which nothing adapts.

    Args:
        target: loaded with adapters, or what records its experts.
        rows: what its layers read.
        by_slot: [S] int64, the adapter of each slot's request; 0: none.
    """

    def __init__(self, target: CausalLM, rows: RowAdapters, by_slot: Tensor) -> None:
        super().__init__(target)
        self._rows, self._by_slot = rows, by_slot

    def forward(
        self,
        token_ids: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: KeptRows | None = None,
    ) -> HiddenStates:
        """See ``CausalLM.forward``; every layer runs all rows."""
        assert kept is None
        self._rows.begin(self._by_slot.index_select(0, rows.slots))
        return self._target.forward(token_ids, rows, cache)

"""What EAGLE heads of every version are to their drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.kernels.cache_types import LayerCache
from sametoken.kernels.interface import AttentionRows
from sametoken.models.base import HiddenStates
from sametoken.state.caches import ModelCache


@dataclass(frozen=True, slots=True)
class HeadStates:
    """What a pass of the head leaves, [T, hidden] each.

    Attributes:
        last: what logits are made from.
        feedback: what the row at the next position takes as its hidden state.
    """

    last: Tensor
    feedback: Tensor


class EagleHead(Protocol):
    """A draft head: row p holds the token at p + 1 and a state of p, and predicts p + 2."""

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """What each of its layers keeps."""
        ...

    @property
    def token_ids(self) -> Tensor | None:
        """[V'] int64, ascending: the token of each logits column; None: column i is token i."""
        ...

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """What rows of the target's forward pass give to the head.

        Args:
            hidden: the target's hidden states of T rows.
            rows: [R] int64, indices of the rows to take; None: all T in order.

        Returns:
            [R, hidden]; may be a tensor of ``hidden``, unless ``forward`` writes into it.
        """
        ...

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: Tensor | None = None,
    ) -> HeadStates:
        """Run rows over paged KV, writing theirs.

        Args:
            token_ids: [T] int64; of a row at position p, the token at p + 1.
            hidden: [T, hidden]; of a row at position p, the target's state at p or the
                head's own ``feedback`` of p - 1. Its memory may be reused.
            rows: where the rows stand.
            cache: what the head keeps.
            kept: [R] int64, the rows whose states are wanted; the others are run for their KV
                alone. None: all.
        """
        ...

    def compute_logits(self, last: Tensor) -> Tensor:
        """[R, hidden] to [R, V'] fp32 over the tokens that it can propose."""
        ...

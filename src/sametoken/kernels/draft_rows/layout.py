"""The rows that a drafter runs, in the compact layout and in the padded one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.kernels.interface import AttentionRows


@dataclass(frozen=True, slots=True)
class Chains:
    """The plan rows that go on to a next window, each a chain of drafts. R chains.

    Attributes:
        owner: [R] int64, plan rows; None: every plan row has a chain.
        last: [R] int64, which of the caught-up rows is each chain's last.
        rows: where each chain stands, in the drafter's own KV: at first at ``end``, the
            position of the newest committed token. None of them counts as committed.
        following: [R] int64, the position after it, where its next draft would stand.
    """

    owner: Tensor | None
    last: Tensor
    rows: AttentionRows
    following: Tensor


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Rows that a drafter with KV of its own has to run, and the chains that go on. T rows.

    Attributes:
        token_ids: [T] int64, the committed token that each row holds.
        rows: where the rows stand, in the drafter's own KV. The newest token does not count
            as committed: the next step's rows start with it again.
        source: [T] int64, each row's flat row in the step's hidden states; None: the rows are
            the step's own, in order. Rows with the newest token, of which the target has made
            no state, have none.
        chains: the chains of drafts.
    """

    token_ids: Tensor
    rows: AttentionRows
    source: Tensor | None
    chains: Chains

    @property
    def slots(self) -> Tensor:
        """[T] int64."""
        return self.rows.slots

    @property
    def positions(self) -> Tensor:
        """[T] int64."""
        return self.rows.positions

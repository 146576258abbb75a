"""What a drafter may read after a commit, in the padded layout of a captured step."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.drafters.context import DraftContext
from sametoken.kernels.draft_rows import DraftRowKernels, select_draft_rows
from sametoken.kernels.draft_rows.layout import CatchUp, Chains


@dataclass(frozen=True, slots=True)
class PaddedDraftContext(DraftContext):
    """Every plan row owns as many rows; dead ones stand at position 0 of the reserved slot.

    Nothing here depends on the data in its shapes, so that the whole chain of drafts can
    be captured. Plan rows that do not sample, and padding, draft into the reserved slot.
    """

    def catch_up(self) -> CatchUp:
        """The live rows of every plan row, each with the token after it."""
        return self._catch_up(with_newest=False)

    def catch_up_with_newest(self) -> CatchUp:
        """The live rows and the newest token of rows that sample, each with its own token."""
        return self._catch_up(with_newest=True)

    def advanced(self, chains: Chains) -> Chains:
        """The chains one position on."""
        return self._kernels.advanced(self._sequences, chains)

    @property
    def _kernels(self) -> DraftRowKernels:
        return select_draft_rows(self.slots.device)

    def _catch_up(self, *, with_newest: bool) -> CatchUp:
        return self._kernels.catch_up(
            self._sequences,
            self.slots,
            self.start,
            self.end,
            self.samples,
            rows_per_plan_row=self.x.token_ids.shape[0] // self.slots.shape[0],
            with_newest=with_newest,
        )

"""The operations of a step, as every device has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from sametoken.kernels.step.types import (
    CatchUp,
    Chains,
    Chances,
    CommittedLengths,
    LayoutTable,
    Sequences,
    StepInputs,
    VerifyResult,
)


class StepOps(Protocol):
    """A module with these functions.

    No shape of a result depends on the data, but in ``compact``.

    ``commit`` and ``publish`` alone write sequences; only the step may call them.
    """

    def known_drafts(self, sequences: Sequences, slots: Sequence[int]) -> list[int] | None:
        """Drafts that the slots have, where reading them costs nothing; None where it does.

        With them rows are laid out for these alone, and no dead row is computed.
        """
        ...

    def prepare_inputs(self, sequences: Sequences, layout: LayoutTable) -> StepInputs:
        """Fill a layout in: which rows are live, their tokens, positions and addresses.

        A request that samples offers ``min(num_drafts[slot], draft_limit)`` drafts; others none.
        """
        ...

    def verify(self, keys: Tensor, x: StepInputs, chances: Chances | None = None) -> VerifyResult:
        """Accept each window's drafts up to the first that is not the target's own token.

        A draft before a row that has no token left counts as the mismatch: it is emitted, and
        the request fails at the next window's start, as it would without drafts.

        Args:
            keys: [L, tiles] int64 of ``Kernels.token_keys``, of the sampled rows.
            x: the step's inputs.
            chances: decide in place of the target how many drafts are accepted.
        """
        ...

    def commit(
        self, sequences: Sequences, x: StepInputs, num_accepted: Tensor, next_token: Tensor
    ) -> CommittedLengths:
        """Make a step's accepted tokens true, for every request of every step.

        Args:
            sequences: the truth to advance.
            x: the step's inputs.
            num_accepted: [B] int64, accepted drafts; 0 for requests that do not sample.
            next_token: [B] int64, read only for requests that sample.
        """
        ...

    def publish(
        self, sequences: Sequences, x: StepInputs, draft_ids: Tensor, num_drafts: Tensor
    ) -> None:
        """Store drafts for the next windows; requests that do not sample get none.

        Args:
            sequences: the truth to write.
            x: the step's inputs.
            draft_ids: [B, k] int64.
            num_drafts: [B] int64, 0..k.
        """
        ...

    def deliver(self, x: StepInputs, verdict: VerifyResult, results: Tensor) -> None:
        """Write each request's result to its place among the host's.

        A result is the step id that was really read, the number of drafts, of proposed drafts and
        of accepted ones, the fault, then the window's tokens, of which the first
        ``num_accepted + 1`` of a request that samples mean something.

        Args:
            x: the step's inputs.
            verdict: of the step.
            results: [R, NUM_COUNTS + k + 1] int64 in host memory that the device reaches, written.
        """
        ...

    def fetch(self, entries: Tensor, turn: Tensor, table: Tensor) -> None:
        """Read the entry of this turn into ``table``, and count the turn.

        Args:
            entries: [N, E] int64 in host memory that the device reaches.
            turn: [1] int64: how often the device has fetched; the entry is its remainder by N.
            table: int64 of at most E elements, contiguous.
        """
        ...

    def catch_up(
        self, sequences: Sequences, x: StepInputs, end: Tensor, *, with_newest: bool
    ) -> CatchUp:
        """Positions ``num_computed .. end - 1`` of every request, and where its chain goes on.

        Rows are laid out as the step's; what was rejected is dead. Requests that do not sample,
        and padding, have their chain in the reserved slot.

        Args:
            sequences: the device's truth.
            x: the step's inputs.
            end: [B] int64, computed positions after the step.
            with_newest: whether requests that sample run the newest token, at ``end``, too; every
                request then has one row more. A row holds its own token then, and else the one
                after it.
        """
        ...

    def advanced(self, sequences: Sequences, chains: Chains) -> Chains:
        """The chains one position on."""
        ...

    def stacked(self, tokens: Sequence[Tensor], samples: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids [B, k] and their number [B], int64, of requests that all have a chain.

        Args:
            tokens: k of [B] int64, one for each draft position.
            samples: [B] bool; other requests get no drafts.
        """
        ...

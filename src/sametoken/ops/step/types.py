"""What the operations of a step take and give. B requests, T rows, L sampled rows.

The operations of a step, as every device has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.ops.backend import (
    AttentionRows,
    RowRuns,
    SampledRows,
)
from sametoken.types.layout import (
    ROW_START,
    StepShape,
)

#: Columns of a result before the window's tokens: step id, drafts, drafts before the limit,
#: accepted drafts, fault.
NUM_COUNTS = 5

#: What may be wrong with a window: nothing, NaN in its logits, or no token that is allowed; that
#: and what lies above says why (``types.structured_outputs.MaskFault``).
SOUND, HAS_NAN, NO_TOKEN = 0, 1, 2


class Sequences(Protocol):
    """Per-slot facts, as ``state.sequences.Sequences`` holds them; S slots."""

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def num_tokens(self) -> Tensor: ...

    @property
    def num_computed(self) -> Tensor: ...

    @property
    def draft_ids(self) -> Tensor: ...

    @property
    def num_drafts(self) -> Tensor: ...

    @property
    def block_table(self) -> Tensor: ...

    @property
    def block_size(self) -> int: ...

    @property
    def reserved_slot(self) -> int: ...

    @property
    def num_speculative_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """A step's layout on the device (``types.layout.StepLayout.table``).

    Attributes:
        table: [TABLE_ROWS, shape.table_width] int64.
        shape: the sizes, padding included.
    """

    table: Tensor
    shape: StepShape

    def row(self, index: int) -> Tensor:
        """[B] int64: one row of the table without what lies behind the last request."""
        return self.table[index, : self.shape.num_requests]

    def starts(self, index: int) -> Tensor:
        """[B + 1] int64: a row of running sums."""
        return self.table[index, : self.shape.num_requests + 1]

    @property
    def runs(self) -> RowRuns:
        """The rows by request."""
        shape = self.shape
        if shape.all_sampled and shape.max_window == 1:
            return RowRuns.even(shape.num_rows, 1)
        return RowRuns(
            shape.num_requests,
            shape.max_rows,
            self.starts(ROW_START),
            shape.num_windows,
            shape.max_window,
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one step; they die with it.

    Request b owns rows ``row_starts[b] .. row_starts[b + 1] - 1``: its committed tokens, then its
    drafts, then dead rows. If it samples, its window's rows are sampled rows
    ``window_starts[b] ..``, of which the first ``num_drafts[b] + 1`` are live. A dead row stands at
    position 0 of the reserved slot. Rows and sampled rows behind the last request's are dead.

    Attributes:
        step_ids: [B] int64, the step that these were made for.
        places: [B] int64, where each result goes among the host's; below 0 for padding.
        slots: [B] int64; padding holds the reserved slot.
        num_tokens, num_computed: [B] int64, before the step.
        num_query: [B] int64, committed tokens computed in this step; 0 for padding.
        num_proposed: [B] int64, drafts that the slot has.
        num_drafts: [B] int64, those of them in this step.
        samples: [B] bool.
        row_starts, window_starts: [B + 1] int64.
        token_ids: [T] int64; of dead rows any.
        rows: where the rows stand.
        sampled: which rows are sampled, and where they stand.
        num_speculative_tokens: k, the most drafts that a window may have.
    """

    step_ids: Tensor
    places: Tensor
    slots: Tensor
    num_tokens: Tensor
    num_computed: Tensor
    num_query: Tensor
    num_proposed: Tensor
    num_drafts: Tensor
    samples: Tensor
    row_starts: Tensor
    window_starts: Tensor
    token_ids: Tensor
    rows: AttentionRows
    sampled: SampledRows
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class Chances:
    """Synthetic acceptance: drafts are accepted by chance, whatever the target says.

    Noise is SplitMix64 keyed by (seed, position), so any run of the same requests draws alike.

    Attributes:
        rates: [k] fp32, how often draft i is accepted if all before it are.
        seeds: [S] int64, 0..2^63-1, by slot.
    """

    rates: Tensor
    seeds: Tensor


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What verification says of a step's windows.

    Attributes:
        tokens: [L] int64, the target's own token at every row of a window, or an accepted draft
            (they differ by synthetic acceptance alone); a valid id even where the row is dead.
            Of rows behind the last window undefined.
        num_accepted: [B] int64, 0..num_drafts; 0 for padding, rows with a fault and rows that
            do not sample.
        next_token: [B] int64, the corrected or bonus token; a valid id for every request.
        faults: [B] int64 of ``SOUND, HAS_NAN, NO_TOKEN``, of the rows that decided:
            0..num_accepted. What rejected rows hold cannot reach a request.
    """

    tokens: Tensor
    num_accepted: Tensor
    next_token: Tensor
    faults: Tensor


@dataclass(frozen=True, slots=True)
class CommittedLengths:
    """Lengths after the commit, [B] int64 each."""

    num_tokens: Tensor
    num_computed: Tensor


@dataclass(frozen=True, slots=True)
class Chains:
    """The requests that go on to a next window, each a chain of drafts. R chains.

    Attributes:
        owner: [R] int64, requests; None: every request has a chain, those that do not sample in
            the reserved slot.
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
        source: [T] int64, each row's row in the step's hidden states; None: the rows are
            the step's own, in order. Rows with the newest token, of which the target has made
            no state, have none.
        chains: the chains of drafts.
    """

    token_ids: Tensor
    rows: AttentionRows
    source: Tensor | None
    chains: Chains


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

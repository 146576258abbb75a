"""``StepOps``, the operations of a step on every device, and their types.

B requests, T rows, L sampled rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, KeptRows, RowRuns, SampledRows
from sametoken.ops.expanded_rows import ExpandedRows
from sametoken.types.layout import (
    NUM_QUERY,
    PLACE,
    ROW_START,
    SLOT,
    STEP_ID,
    WINDOW_START,
    StepShape,
)

#: Columns of a result before the window's tokens: step id, drafts, drafts before the limit,
#: accepted drafts, fault.
NUM_COUNTS = 5

#: Fault of a row: none, NaN in its logits, or no valid token. Values from NO_TOKEN on are the
#: reasons of ``types.structured_outputs.MaskFault``.
SOUND, HAS_NAN, NO_TOKEN = 0, 1, 2


class Sequences(Protocol):
    """Device state by slot, as in ``state.sequences.Sequences``; S slots."""

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

    def starts(self, index: int) -> Tensor:
        """[B + 1] int64: a row of running sums."""
        return self.table[index, : self.shape.num_requests + 1]

    @property
    def runs(self) -> RowRuns:
        """The rows by request."""
        shape = self.shape
        if shape.all_sampled and shape.max_window == 1:
            assert shape.num_rows == shape.num_requests
            return RowRuns.even(shape.num_rows, 1)
        return RowRuns(
            shape.num_requests,
            shape.max_rows,
            self.starts(ROW_START),
            shape.num_windows,
            shape.max_window,
        )

    def with_expanded(self, rows: AttentionRows, block_size: int) -> AttentionRows:
        """The step's rows, of which those of expanded prompts stand apart."""
        expanded = self.shape.expanded
        if not expanded:
            return rows
        first, table = expanded[0].first_row, rows.block_table
        longest, starts = min(self.shape.max_rows, first), self.starts(ROW_START).clamp(max=first)
        runs = replace(self.runs, max_rows=longest, starts=starts)
        others = AttentionRows(
            rows.positions[:first], rows.slots[:first], rows.kv_slots[:first], table, runs
        )
        return replace(rows, expanded=ExpandedRows(others, rows, expanded, block_size))

    def inputs(
        self,
        sequences: Sequences,
        lengths: Sequence[Tensor],
        samples: Tensor,
        token_ids: Tensor,
        rows: AttentionRows,
        sampled: SampledRows,
    ) -> StepInputs:
        """The step's inputs, of what an operation read from ``sequences``.

        Args:
            lengths: ``num_tokens``, ``num_computed``, ``num_proposed`` and ``num_drafts``.
            samples, token_ids, rows, sampled: as ``StepInputs`` has them.
        """
        num_tokens, num_computed, num_proposed, num_drafts = lengths
        of_requests = self.table[:, : self.shape.num_requests].unbind()
        return StepInputs(
            step_ids=of_requests[STEP_ID],
            places=of_requests[PLACE],
            slots=of_requests[SLOT],
            num_tokens=num_tokens,
            num_computed=num_computed,
            num_query=of_requests[NUM_QUERY],
            num_proposed=num_proposed,
            num_drafts=num_drafts,
            samples=samples,
            row_starts=self.starts(ROW_START),
            window_starts=self.starts(WINDOW_START),
            token_ids=token_ids,
            rows=rows,
            sampled=sampled,
            kept=self.kept(sampled, sequences.block_table),
            num_speculative_tokens=sequences.num_speculative_tokens,
        )

    def kept(self, sampled: SampledRows, block_table: Tensor) -> KeptRows | None:
        """The sampled rows, if only their states are wanted; None: all rows are."""
        shape = self.shape
        if sampled.index is None or shape.all_states:
            return None
        count, longest = shape.num_requests, shape.max_window
        runs = RowRuns(count, longest, self.starts(WINDOW_START), count, longest)
        return KeptRows(sampled.index, sampled.positions, sampled.slots, block_table, runs)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one step, valid for that step only.

    Request b owns rows ``row_starts[b] .. row_starts[b + 1] - 1``: its committed tokens, then its
    drafts, then dead rows. If it samples, its window is sampled rows ``window_starts[b] ..``, of
    which the first ``num_drafts[b] + 1`` are live. Dead rows are at position 0 of the reserved
    slot. Rows and sampled rows after the last request's are dead.

    Attributes:
        step_ids: [B] int64, the step that these inputs belong to.
        places: [B] int64, index of each result in the host's results; below 0 for padding.
        slots: [B] int64; padding holds the reserved slot.
        num_tokens, num_computed: [B] int64, before the step.
        num_query: [B] int64, committed tokens computed in this step; 0 for padding.
        num_proposed: [B] int64, drafts of the slot.
        num_drafts: [B] int64, drafts in this step.
        samples: [B] bool.
        row_starts, window_starts: [B + 1] int64.
        token_ids: [T] int64; arbitrary for dead rows.
        rows: slots, positions and KV addresses of the rows.
        sampled: the sampled rows.
        kept: the same, if the last layer's states of no other row are wanted; None: of all rows.
        num_speculative_tokens: k, the most drafts of a window.
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
    kept: KeptRows | None
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class Chances:
    """Synthetic acceptance: drafts are accepted at random, independent of the target.

    Noise is SplitMix64 keyed by (seed, position), so every run of the same requests draws the same.

    Attributes:
        rates: [k] fp32, probability of accepting draft i if all before it are accepted.
        seeds: [S] int64, 0..2^63-1, by slot.
    """

    rates: Tensor
    seeds: Tensor

    @classmethod
    def of(cls, unconditional: Sequence[float], seeds: Tensor) -> Chances:
        """From k non-increasing rates: how often drafts 1..i are all accepted.

        They are ``SpeculativeConfig.synthetic_rates``, from 0 to 1.
        """
        ratios = zip(unconditional, (1.0, *unconditional), strict=False)
        rates = [rate / last if last else 0.0 for rate, last in ratios]
        return cls(torch.tensor(rates, dtype=torch.float32, device=seeds.device), seeds)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of verifying a step's windows.

    Attributes:
        tokens: [L] int64, the target's own token at every row of a window, or an accepted draft
            (these differ under synthetic acceptance only); a valid id even for dead rows.
            Undefined for rows after the last window.
        num_accepted: [B] int64, 0..num_drafts; 0 for padding, windows with a fault and requests
            that do not sample.
        next_token: [B] int64, the corrected or bonus token; a valid id for every request.
        faults: [B] int64 of ``SOUND, HAS_NAN, NO_TOKEN``, of the first row. A later one with a
            fault ends the window before it: the draft there is ``next_token``, not accepted.
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
    """Chains of drafts, one per request that drafts its next window. R chains.

    Attributes:
        owner: [R] int64, requests; None: every request has a chain, on the reserved slot if it
            does not sample.
        last: the caught-up row that is each chain's last.
        rows: each chain's current row in the drafter's own KV: first ``end``, the position of
            the newest committed token. None counts as committed.
        following: [R] int64, the position after it, of the next draft.
    """

    owner: Tensor | None
    last: KeptRows
    rows: AttentionRows
    following: Tensor


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Rows that a drafter with its own KV has to run, and the chains of drafts. T rows.

    Attributes:
        token_ids: [T] int64, the committed token of each row.
        rows: positions and addresses in the drafter's own KV. The newest token does not count
            as committed: the next step's rows start with it again.
        source: [T] int64, each row's index in the step's hidden states; None: the step's own
            rows, in order. Rows of the newest token have none, as the target has not run it.
        chains: the chains of drafts.
    """

    token_ids: Tensor
    rows: AttentionRows
    source: Tensor | None
    chains: Chains


class TableWrite(NamedTuple):
    """What the host sets in a table by slot between steps.

    Attributes:
        part: a number or a contiguous row of the table, int64, fp32 or fp64.
        values: as many.
    """

    part: Tensor
    values: float | Sequence[int]


class StepOps(Protocol):
    """The operations of a step; modules implement it.

    Shapes of results do not depend on data, except in ``compact``. Only ``write_tables``,
    ``commit`` and ``publish`` write sequences: the first between steps, the others in them.
    """

    def write_tables(self, writes: Sequence[TableWrite]) -> None:
        """Set parts of tables, as if one after the other."""
        ...

    def known_drafts(self, sequences: Sequences, slots: Sequence[int]) -> list[int] | None:
        """Number of drafts of each slot if reading it is free, else None.

        With these numbers rows are laid out without dead rows.
        """
        ...

    def prepare_inputs(self, sequences: Sequences, layout: LayoutTable) -> StepInputs:
        """Fill in a layout: live rows, their tokens, positions and addresses.

        A request that samples offers ``min(num_drafts[slot], draft_limit)`` drafts; others none.
        """
        ...

    def verify(self, keys: Tensor, x: StepInputs, chances: Chances | None = None) -> VerifyResult:
        """Accept each window's drafts up to the first that differs from the target's own token.

        A draft before a row without a valid token counts as the mismatch: it is emitted, and the
        request fails at the start of the next window, as it would without drafts.

        Args:
            keys: [L, tiles] int64 from ``Kernels.token_keys``, of the sampled rows.
            x: the step's inputs.
            chances: synthetic acceptance, if any.
        """
        ...

    def commit(
        self, sequences: Sequences, x: StepInputs, num_accepted: Tensor, next_token: Tensor
    ) -> CommittedLengths:
        """Write accepted tokens and new lengths, for every request of every step.

        Args:
            sequences: the device state to advance.
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
            sequences: the device state to write.
            x: the step's inputs.
            draft_ids: [B, k] int64.
            num_drafts: [B] int64, 0..k.
        """
        ...

    def deliver(self, x: StepInputs, verified: VerifyResult, results: Tensor) -> None:
        """Write each request's result to its row of the host's results.

        A result is the step id that the device read, the number of drafts, of proposed drafts and
        of accepted drafts, the fault, then the window's tokens, of which the first
        ``num_accepted + 1`` are valid if the request samples.

        Args:
            x: the step's inputs.
            verified: of the step.
            results: [R, NUM_COUNTS + k + 1] int64 in device-accessible host memory, written.
        """
        ...

    def fetch(self, entries: Tensor, num_fetched: Tensor, table: Tensor) -> None:
        """Copy the next entry of a ring buffer into ``table``.

        Args:
            entries: [N, E] int64 in device-accessible host memory.
            num_fetched: [1] int64, number of fetches so far; entry ``num_fetched % N`` is next.
                Incremented.
            table: int64 of at most E elements, contiguous.
        """
        ...

    def catch_up(
        self, sequences: Sequences, x: StepInputs, end: Tensor, *, with_newest: bool
    ) -> CatchUp:
        """Rows for positions ``num_computed .. end - 1`` of every request, and its chain.

        Rows have the step's layout; rejected rows are dead. Requests that do not sample, and
        padding, have their chain on the reserved slot.

        Args:
            sequences: the device state.
            x: the step's inputs.
            end: [B] int64, computed positions after the step.
            with_newest: also run the newest token, at ``end``, of requests that sample; every
                request then has one more row. Rows then hold the token of their position,
                otherwise the next one.
        """
        ...

    def advanced(self, sequences: Sequences, chains: Chains) -> Chains:
        """The chains, advanced by one position."""
        ...

    def stacked(self, tokens: Sequence[Tensor], samples: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids [B, k] and their numbers [B], int64, of requests that all have a chain.

        Args:
            tokens: k tensors [B] int64, one per draft position.
            samples: [B] bool; other requests get no drafts.
        """
        ...

"""Committed rows of a running engine, by request, into shards for training drafters.

Rows come from the device by slot and the front knows requests: only the engine knows both,
so the writer lives here. The copies themselves are the runner's (``extraction/writer.py``).

Committed rows on their way to the host, each step's until its verdict is read.
"""

from __future__ import annotations

import uuid
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter
from sametoken.drafters.extract import CommittedRows, ExtractDrafter
from sametoken.errors import InvariantError
from sametoken.extraction.shards import (
    Manifest,
    RowRange,
    SequenceEntry,
    prompt_digest,
    write_manifest,
    write_shard,
)
from sametoken.io.files import DirectoryLock
from sametoken.state.upload import to_host
from sametoken.types.outputs import StepResult
from sametoken.types.plan import (
    Admission,
    StepPlan,
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one sequence from one step, in host memory of their own."""

    token_ids: Tensor
    next_token_ids: Tensor
    states: Tensor

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def first(self, num_rows: int) -> _Piece:
        return _Piece(
            self.token_ids[:num_rows], self.next_token_ids[:num_rows], self.states[:num_rows]
        )


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request's rows on their way to shards.

    Attributes:
        num_rows: positions that have come, those in shards included.
        pieces: the last of them, not written yet.
        num_written: positions in shards.
        index: its place in the manifest, from its first shard on.
        ended: whether rows that are still in flight are nobody's.
    """

    request_id: str
    prompt_digest: str
    prompt_len: int
    num_rows: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    num_written: int = 0
    index: int | None = None
    ended: bool = False
    complete: bool = False

    @classmethod
    def of(cls, admission: Admission) -> _Sequence:
        prompt = admission.prompt_token_ids
        return cls(admission.request_id, prompt_digest(prompt), len(prompt))

    def entry(self) -> SequenceEntry:
        return SequenceEntry(
            self.request_id, self.prompt_digest, self.prompt_len, self.num_written, self.complete
        )

    def cut(self, num_rows: int) -> None:
        """Drop the rows from position ``num_rows`` on that are not written."""
        while self.pieces and self.num_rows > num_rows:
            piece = self.pieces.pop()
            self.num_rows -= len(piece)
            if self.num_rows < num_rows:
                kept = piece.first(num_rows - self.num_rows)
                self.num_rows += len(kept)
                self.pieces.append(kept)


class StateWriter:
    """Writes the committed rows of every request that ends by itself.

    A request of n kept tokens gets rows for positions 0 .. n - 2: its last token is never
    run for it, whatever is in flight. Rows of a request that is aborted or whose logits are
    NaN are dropped; those that a shard already holds stay, in a sequence that never becomes
    complete.

    Host memory holds ``shard_bytes`` and one step's rows at most, twice while they are
    written. Only rows of steps before the one being settled are written, because the front
    may still cut the newest (tests/unit/extraction/test_writer.py).

    Args:
        directory: where shards and manifest go.
        lock: of the directory, held as long as the writer is there.
        manifest: what is there already.
        num_layers: layers in a row.
        shard_bytes: states of one shard, about.
    """

    def __init__(
        self,
        directory: Path,
        lock: DirectoryLock,
        manifest: Manifest,
        num_layers: int,
        shard_bytes: int,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._run = uuid.uuid4().hex
        self._source = manifest.source
        self._entries = list(manifest.sequences)
        self._shards = list(manifest.shards)
        self._num_layers = num_layers
        self._shard_bytes = shard_bytes
        self._rows = CommittedRowsOutput()
        self._in_flight: deque[StepPlan] = deque()
        self._by_slot: dict[int, _Sequence] = {}
        self._by_id: dict[str, _Sequence] = {}
        # In the order in which they will be written.
        self._held: list[_Sequence] = []
        self._num_bytes = 0
        self._at_rest = True

    def wrap(self, drafter: Drafter) -> Drafter:
        """The drafter, with every step's committed rows recorded."""
        return ExtractDrafter(drafter, self._rows)

    def launch(self, plan: StepPlan) -> None:
        """Expect rows of the requests that the step admits.

        Raises:
            InvariantError: the prefix cache supplies positions, which have no states then.
        """
        for admission in plan.admissions:
            if admission.num_cached:
                raise InvariantError(
                    f"request {admission.request_id!r} takes {admission.num_cached} positions "
                    "from the prefix cache, whose states are not computed"
                )
            sequence = _Sequence.of(admission)
            self._by_slot[admission.slot] = self._by_id[admission.request_id] = sequence
        if plan.admissions and self._at_rest:
            self._at_rest = False
            self._write_manifest()
        self._in_flight.append(plan)

    def process_output(self, result: StepResult) -> None:
        """Take the rows of the oldest step, whose verdict was read.

        Raises:
            InvariantError: the step brought no rows, or rows that do not follow on the last.
            ConfigError: the directory cannot be written.
        """
        if self._num_bytes >= self._shard_bytes:
            self._write_shard()
        plan = self._in_flight.popleft()
        if not plan.requests:
            return
        rows = self._rows.take(plan.step_id)
        for row, verdict in zip(plan.requests, result.requests, strict=True):
            sequence = self._by_slot[row.slot]
            if verdict.failed and not sequence.ended:
                self._drop(sequence)
        first = 0
        for slot, group in groupby(rows.slots.tolist()):
            last = first + len(list(group))
            if slot in self._by_slot:
                self._add(self._by_slot[slot], rows, first, last)
            first = last

    def end(self, request_id: str, num_kept_tokens: int | None, *, aborted: bool) -> None:
        """Keep the rows of the kept tokens, or none of a request that was cut short.

        Raises:
            InvariantError: kept tokens were never computed.
        """
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return
        if aborted or num_kept_tokens is None:
            self._drop(sequence)
            return
        num_rows = num_kept_tokens - 1
        if sequence.num_rows < num_rows:
            raise InvariantError(
                f"request {request_id!r} keeps {num_kept_tokens} tokens, and states of "
                f"{sequence.num_rows} positions have come"
            )
        self._close(sequence, num_rows)
        # A front that lags may cut what a shard already holds.
        sequence.complete = sequence.num_rows == num_rows
        self._note(sequence)

    def flush(self) -> None:
        """Write what is held; the directory is whole then.

        Raises:
            ConfigError: the directory cannot be written.
        """
        if self._at_rest:
            return
        self._at_rest = True
        if any(sequence.pieces for sequence in self._held):
            self._write_shard()
        else:
            self._write_manifest()

    def close(self) -> None:
        """Let another writer have the directory; what is not written is lost."""
        self._lock.close()

    def _add(self, sequence: _Sequence, rows: CommittedRows, first: int, last: int) -> None:
        if sequence.ended:
            return
        positions = rows.positions[first:last].tolist()
        if positions != list(range(sequence.num_rows, sequence.num_rows + last - first)):
            raise InvariantError(
                f"request {sequence.request_id!r} has rows up to position {sequence.num_rows}, "
                f"and then positions {positions[0]}..{positions[-1]}"
            )
        if not sequence.pieces:
            self._held.append(sequence)
        states = rows.states[first:last].clone()
        # Copies: a view would keep the whole step's rows, and a GPU's pinned memory.
        sequence.pieces.append(
            _Piece(
                rows.token_ids[first:last].clone(), rows.next_token_ids[first:last].clone(), states
            )
        )
        sequence.num_rows = positions[-1] + 1
        self._num_bytes += states.nbytes

    def _drop(self, sequence: _Sequence) -> None:
        self._close(sequence, 0)
        self._note(sequence)

    def _close(self, sequence: _Sequence, num_rows: int) -> None:
        """End a sequence, without the unwritten rows from position ``num_rows`` on."""
        self._by_id.pop(sequence.request_id, None)
        sequence.ended = True
        before = sum(piece.states.nbytes for piece in sequence.pieces)
        sequence.cut(num_rows)
        self._num_bytes -= before - sum(piece.states.nbytes for piece in sequence.pieces)

    def _note(self, sequence: _Sequence) -> None:
        if sequence.index is not None:
            self._entries[sequence.index] = sequence.entry()

    def _write_shard(self) -> None:
        held = [sequence for sequence in self._held if sequence.pieces]
        ranges, pieces = [], []
        for sequence in held:
            if sequence.index is None:
                sequence.index = len(self._entries)
                self._entries.append(sequence.entry())
            ranges.append(RowRange(sequence.index, sequence.num_written, sequence.num_rows))
            pieces.extend(sequence.pieces)
        states = torch.cat([piece.states for piece in pieces])
        shard = write_shard(
            self._directory,
            f"hidden_states-{len(self._shards):05}.safetensors",
            self._run,
            tuple(ranges),
            {
                "hidden_states": states.view(states.shape[0], self._num_layers, -1),
                "token_ids": torch.cat([piece.token_ids for piece in pieces]),
                "next_token_ids": torch.cat([piece.next_token_ids for piece in pieces]),
            },
        )
        self._shards.append(shard)
        for sequence in held:
            sequence.num_written = sequence.num_rows
            sequence.pieces.clear()
            self._note(sequence)
        self._held.clear()
        self._num_bytes = 0
        self._write_manifest()

    def _write_manifest(self) -> None:
        manifest = Manifest(self._source, self._at_rest, tuple(self._entries), tuple(self._shards))
        write_manifest(self._directory, manifest)


@dataclass(frozen=True, slots=True)
class CommittedRowsOutput:
    """A ``RowSink`` whose copies land in memory of their own, pinned on a GPU.

    They are enqueued inside the step, before its end is marked. So they have landed once the
    step's verdict has been waited for, and nothing else is waited for.
    """

    _in_flight: deque[CommittedRows] = field(default_factory=deque)

    def put(self, rows: CommittedRows) -> None:
        """Enqueue the copies of a step's rows."""
        self._in_flight.append(
            CommittedRows(
                step_ids=to_host(rows.step_ids),
                slots=to_host(rows.slots),
                positions=to_host(rows.positions),
                token_ids=to_host(rows.token_ids),
                next_token_ids=to_host(rows.next_token_ids),
                states=to_host(rows.states),
            )
        )

    def take(self, step_id: int) -> CommittedRows:
        """The rows of the oldest step, whose result has been read.

        Raises:
            InvariantError: it brought none, or they are another step's.
        """
        if not self._in_flight:
            raise InvariantError(f"step {step_id} was settled before its rows came")
        rows = self._in_flight.popleft()
        found = int(rows.step_ids[0])
        if found != step_id:
            raise InvariantError(f"step {step_id} brought the rows of step {found}")
        return rows

"""Write the committed rows of a running engine, by request, to shards for training drafters."""

from __future__ import annotations

import uuid
from collections import deque
from dataclasses import dataclass, field, fields
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
from sametoken.types.plan import Admission, StepPlan


@dataclass(frozen=True, slots=True)
class _Piece:
    """A host copy of one sequence's rows from one step."""

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
    """The rows of one request.

    Attributes:
        num_rows: positions received, including those in shards.
        pieces: the newest of them, not written yet.
        num_written: positions in shards.
        index: its index in the manifest, once its first shard is written.
        ended: whether rows that are still in flight are ignored.
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
        """Drop the unwritten rows from position ``num_rows`` on."""
        while self.pieces and self.num_rows > num_rows:
            piece = self.pieces.pop()
            self.num_rows -= len(piece)
            if self.num_rows < num_rows:
                kept = piece.first(num_rows - self.num_rows)
                self.num_rows += len(kept)
                self.pieces.append(kept)


class StateWriter:
    """Writes the committed rows of every request that finishes.

    A request that keeps n tokens gets rows for positions 0 .. n - 2: its last token is not an
    input of any of its steps. Rows of a request that is aborted or has NaN logits are dropped;
    those already in a shard stay, in a sequence that remains incomplete.

    Host memory holds at most ``shard_bytes`` plus one step's rows, and twice that while a shard
    is written. Only rows of steps before the one being processed are written, because the
    engine client may still cut the newest (tests/unit/extraction/test_writer.py).

    Args:
        directory: the directory of the shards and the manifest.
        lock: the directory's lock, held until ``close``.
        manifest: the existing manifest.
        num_layers: layers per row.
        shard_bytes: approximate size of a shard's states.
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
        # In the order of writing.
        self._held: list[_Sequence] = []
        self._num_bytes = 0
        self._at_rest = True

    def wrap(self, drafter: Drafter) -> Drafter:
        """The drafter, with every step's committed rows recorded."""
        return ExtractDrafter(drafter, self._rows)

    def launch(self, plan: StepPlan) -> None:
        """Expect rows of the requests that the step admits.

        Raises:
            InvariantError: the prefix cache supplies positions, whose states are not computed.
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
        """Take the rows of the oldest step, whose result was read.

        Raises:
            InvariantError: the step has no rows, or its rows do not continue their sequence.
            ConfigError: the directory cannot be written.
        """
        if self._num_bytes >= self._shard_bytes:
            self._write_shard()
        plan = self._in_flight.popleft()
        if not plan.requests:
            return
        rows = self._rows.take(plan.step_id)
        for scheduled, request_result in zip(plan.requests, result.requests, strict=True):
            sequence = self._by_slot[scheduled.slot]
            if request_result.failed and not sequence.ended:
                self._drop(sequence)
        first = 0
        replays = {scheduled.slot for scheduled in plan.requests if scheduled.replays}
        for slot, group in groupby(rows.slots.tolist()):
            last = first + len(list(group))
            if slot in self._by_slot and slot not in replays:
                self._add(self._by_slot[slot], rows, first, last)
            first = last

    def end(self, request_id: str, num_kept_tokens: int | None, *, aborted: bool) -> None:
        """Keep the rows of the kept tokens; drop all rows of an aborted request.

        Raises:
            InvariantError: states of kept tokens are missing.
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
                f"{sequence.num_rows} positions were received"
            )
        self._close(sequence, num_rows)
        # A lagging engine client may cut tokens whose rows are already in a shard.
        sequence.complete = sequence.num_rows == num_rows
        self._note(sequence)

    def flush(self) -> None:
        """Write the remaining rows; the directory is complete afterwards.

        Raises:
            ConfigError: the directory cannot be written.
        """
        if self._at_rest:
            return
        self._at_rest = True
        try:
            if any(sequence.pieces for sequence in self._held):
                self._write_shard()
            else:
                self._write_manifest()
        except BaseException:
            # The next call tries again.
            self._at_rest = False
            raise

    def close(self) -> None:
        """Release the directory; unwritten rows are lost."""
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
        # Copies: a view would keep the whole step's rows alive, in pinned memory on a GPU.
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
        ranges, pieces, num_entries = [], [], len(self._entries)
        for sequence in held:
            place = sequence.index
            if place is None:
                # Entered once the shard is there: no manifest may have an entry without rows.
                place, num_entries = num_entries, num_entries + 1
            ranges.append(RowRange(place, sequence.num_written, sequence.num_rows))
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
            if sequence.index is None:
                sequence.index = len(self._entries)
                self._entries.append(sequence.entry())
            self._note(sequence)
        self._held.clear()
        self._num_bytes = 0
        self._write_manifest()

    def _write_manifest(self) -> None:
        manifest = Manifest(self._source, self._at_rest, tuple(self._entries), tuple(self._shards))
        write_manifest(self._directory, manifest)


@dataclass(frozen=True, slots=True)
class CommittedRowsOutput:
    """A ``RowSink`` that copies rows to host memory, pinned on a GPU.

    The copies are enqueued inside the step, before its completion event, so they have completed
    once the step's result has been waited for.
    """

    _in_flight: deque[CommittedRows] = field(default_factory=deque)

    def put(self, rows: CommittedRows) -> None:
        """Enqueue the copies of a step's rows."""
        copies = {one.name: to_host(getattr(rows, one.name)) for one in fields(CommittedRows)}
        self._in_flight.append(CommittedRows(**copies))

    def take(self, step_id: int) -> CommittedRows:
        """The rows of the oldest step, whose result has been read.

        Raises:
            InvariantError: there are none, or they belong to another step.
        """
        if not self._in_flight:
            raise InvariantError(f"step {step_id} was processed before its rows were recorded")
        rows = self._in_flight.popleft()
        found = int(rows.step_ids[0])
        if found != step_id:
            raise InvariantError(f"step {step_id} has the rows of step {found}")
        return rows

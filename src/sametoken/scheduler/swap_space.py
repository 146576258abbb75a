"""Swap space: blocks of host memory, and of a file, for KV that has left the device."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

#: Of a cached prefix block: its key there. Of a preempted request: its admission and an index.
Key = bytes | tuple[int, int]

#: While less than 1 / SPARE of the host blocks are free, blocks move on to the file.
SPARE = 4

#: Blocks on their way to the file at most: a request whose blocks are read waits for these writes.
#: A slow disk takes what it can, the rest is dropped.
MOST_WRITES = 128

#: Before the first step.
NEVER = -1


class BlockFile(Protocol):
    """Blocks in a file, written from host blocks and read back in the background.

    Attributes:
        num_blocks: places for blocks; 0 once the file has failed.
    """

    num_blocks: int

    def write(self, place: int, host_block: int) -> None:
        """Start to copy a host block to a place."""
        ...

    def read(self, place: int, host_block: int) -> None:
        """Start to copy a place to a host block."""
        ...

    def finished(self, *, wait: bool = False) -> Sequence[tuple[int, bool]]:
        """Places whose copies have ended since the last call, and whether they are right.

        Args:
            wait: return at least one.
        """
        ...


class NoFile:
    """No file: host memory alone."""

    num_blocks = 0

    def write(self, place: int, host_block: int) -> None:
        """Never called: there is no place."""

    def read(self, place: int, host_block: int) -> None:
        """Never called: there is no place."""

    def finished(self, *, wait: bool = False) -> Sequence[tuple[int, bool]]:
        """Nothing."""
        return ()


NO_FILE: BlockFile = NoFile()


class Found(enum.Enum):
    """Where saved blocks are."""

    HERE = "all in host memory"
    COMING = "some are being read from the file"
    GONE = "some are lost"


@dataclass(slots=True, eq=False)
class _Saved:
    """One saved block: in host memory, in the file, or on its way between them.

    Attributes:
        host, place: the host block and the place in the file that it holds.
        reading: while both are held, whether it moves to host memory.
        dropped: nobody wants it any more; what it holds is freed when its move ends.
    """

    key: Key
    host: int | None = None
    place: int | None = None
    reading: bool = False
    dropped: bool = False

    @property
    def is_here(self) -> bool:
        return self.host is not None and self.place is None

    @property
    def moves(self) -> bool:
        return self.host is not None and self.place is not None


class SwapSpace:
    """Assigns host blocks and places in a file to saved blocks, by key.

    Blocks of idle prefixes make room for those of preempted requests, the least recently used
    first. With a file, blocks move on to it before host memory is full. A saved block may be lost:
    its owner computes it again.

    The device copies in stream order, the file at any time. So a host block is copied to or from
    the file only after every step that uses it has been processed.

    Args:
        num_blocks: host blocks.
        num_idle_blocks: how many of them idle prefixes may have.
        file: where blocks move on to.

    Attributes:
        num_blocks: host blocks.
    """

    def __init__(self, num_blocks: int, num_idle_blocks: int, file: BlockFile = NO_FILE) -> None:
        self.num_blocks = num_blocks
        self._num_idle_blocks = num_idle_blocks
        self._file = file
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_places = list(range(self._file.num_blocks - 1, -1, -1))
        # With a host block: of idle prefixes, the least recently used first; of requests.
        self._idle: OrderedDict[Key, _Saved] = OrderedDict()
        self._owned: OrderedDict[Key, _Saved] = OrderedDict()
        # In the file alone, the oldest first.
        self._filed: OrderedDict[Key, _Saved] = OrderedDict()
        self._moving: dict[int, _Saved] = {}
        # Freed by the step that is being planned, which still reads them.
        self._freed: list[int] = []
        self._used_in = [NEVER] * num_blocks
        self._step_id = 0
        self._processed = NEVER
        self._wanted: set[Key] = set()

    @property
    def usage(self) -> float:
        """Fraction of the host blocks in use, 0..1."""
        return 1 - (len(self._free) + len(self._freed)) / self.num_blocks if self.num_blocks else 0

    @property
    def is_moving(self) -> bool:
        """Whether blocks are on their way to or from the file."""
        return bool(self._moving)

    def begin(self, step_id: int) -> None:
        """Start to plan a step: what earlier steps have freed may be used."""
        self._step_id = step_id
        self._free += self._freed
        self._freed.clear()
        self._end_moves(self._file.finished())
        self._move_on()
        self._wanted.clear()

    def wait(self) -> None:
        """Wait until a block has arrived in host memory or in the file."""
        self._end_moves(self._file.finished(wait=True))

    def processed(self, step_id: int) -> None:
        """The step and all before it have run."""
        self._processed = step_id

    def save_prefix(self, key: bytes) -> int | None:
        """The host block to copy an evicted prefix block to; None if there is no need or room."""
        if key in self._filed:
            return None
        if known := self._idle.pop(key, None):
            self._idle[key] = known
            return None
        if len(self._idle) >= self._num_idle_blocks and not self._drop_idle():
            return None
        if not self._make_room(1):
            return None
        saved = self._idle[key] = _Saved(key, self._take())
        return saved.host

    def save_request(self, keys: Sequence[Key]) -> tuple[int, ...] | None:
        """Host blocks for a preempted request's blocks; None if there is no room for all."""
        if len(keys) > self.num_blocks - len(self._owned) or not self._make_room(len(keys)):
            return None
        for key in keys:
            self._owned[key] = _Saved(key, self._take())
        return self.host_blocks(keys)

    def saved_prefix(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """The longest beginning of ``keys`` that is saved and has room in host memory."""
        count = 0
        for key in keys:
            saved = self._entry(key)
            if saved is None or not (saved.is_here or 2 * count < self._num_idle_blocks):
                break
            count += 1
        return tuple(keys[:count])

    def fetch(self, keys: Sequence[Key]) -> Found:
        """Say where saved blocks are, and start to read those that are in the file.

        Until the next step is planned they are not dropped to make room.
        """
        self._wanted.update(keys)
        found = Found.HERE
        for saved in [self._entry(key) for key in keys]:
            if saved is None:
                return Found.GONE
            if saved.host is None and not self._read(saved) and not self._has_room_soon():
                return Found.GONE
            if not saved.is_here:
                found = Found.COMING
        return found

    def host_blocks(self, keys: Sequence[Key]) -> tuple[int, ...]:
        """The host blocks of blocks that are all in host memory, for this step to copy."""
        blocks = tuple(_host_of(self._entry(key)) for key in keys)
        for block in blocks:
            self._used_in[block] = self._step_id
        return blocks

    def drop(self, keys: Sequence[Key]) -> None:
        """Forget saved blocks; unknown keys are ignored."""
        for key in keys:
            for entries in (self._idle, self._owned, self._filed):
                if saved := entries.pop(key, None):
                    saved.dropped = True
                    if not saved.moves:
                        self._release(saved)

    def _entry(self, key: Key) -> _Saved | None:
        return self._idle.get(key) or self._owned.get(key) or self._filed.get(key)

    # Host memory

    def _make_room(self, count: int) -> bool:
        """Whether ``count`` host blocks are free, after idle prefixes have been dropped."""
        while len(self._free) < count:
            if not self._drop_idle():
                return False
        return True

    def _drop_idle(self) -> bool:
        """Free the host block of the least recently used prefix that this step does not use."""
        saved = next(filter(self._may_drop, self._idle.values()), None)
        if saved is None:
            return False
        del self._idle[saved.key]
        self._release(saved)
        return True

    def _may_drop(self, saved: _Saved) -> bool:
        in_use = saved.key in self._wanted or self._used_in[_host_of(saved)] == self._step_id
        return saved.is_here and not in_use

    def _take(self) -> int:
        block = self._free.pop()
        self._used_in[block] = self._step_id
        return block

    def _release(self, saved: _Saved) -> None:
        if saved.host is not None:
            in_this_step = self._used_in[saved.host] == self._step_id
            (self._freed if in_this_step else self._free).append(saved.host)
        if saved.place is not None:
            self._free_places.append(saved.place)

    # The file

    def _move_on(self) -> None:
        """Write blocks to the file while host memory is short, idle prefixes first."""
        writing = sum(not saved.reading for saved in self._moving.values())
        missing = self.num_blocks // SPARE - len(self._free) - writing
        missing = min(missing, MOST_WRITES - writing)
        if missing <= 0 or not self._file.num_blocks:
            return
        every = chain(self._idle.values(), self._owned.values())
        for saved in list(islice(filter(self._may_move_on, every), missing)):
            place = self._free_place()
            if place is None:
                return
            saved.place = place
            self._moving[place] = saved
            # Behind those that ``_drop_idle`` and the next call of this look through.
            self._entries_of(saved).move_to_end(saved.key)
            self._file.write(place, _host_of(saved))

    def _free_place(self) -> int | None:
        """A place in the file, that of the oldest prefix if none is free."""
        if not self._free_places:
            for key, saved in self._filed.items():
                if isinstance(key, bytes) and key not in self._wanted:
                    del self._filed[key]
                    self._release(saved)
                    break
        return self._free_places.pop() if self._free_places else None

    def _read(self, saved: _Saved) -> bool:
        """Start to read a block from the file; False if no host block can take it now."""
        self._make_room(1)
        quiet = next((b for b in self._free if self._used_in[b] <= self._processed), None)
        if quiet is None or saved.place is None:
            return False
        self._free.remove(quiet)
        saved.host, saved.reading = quiet, True
        self._moving[saved.place] = self._filed.pop(saved.key)
        self._entries_of(saved)[saved.key] = saved
        self._file.read(saved.place, quiet)
        return True

    def _has_room_soon(self) -> bool:
        """Whether a host block will be free without anything being dropped."""
        return bool(self._free or self._freed or self._moving)

    def _may_move_on(self, saved: _Saved) -> bool:
        is_idle = saved.is_here and saved.key not in self._wanted
        return is_idle and self._used_in[_host_of(saved)] <= self._processed

    def _entries_of(self, saved: _Saved) -> OrderedDict[Key, _Saved]:
        return self._idle if isinstance(saved.key, bytes) else self._owned

    def _end_moves(self, finished: Sequence[tuple[int, bool]]) -> None:
        """Give each block that has been copied its one place; one that was read wrong is lost."""
        for place, is_right in finished:
            saved = self._moving.pop(place)
            if saved.dropped:
                self._release(saved)
            elif saved.reading and not is_right:
                del self._entries_of(saved)[saved.key]
                self._release(saved)
            elif saved.reading or not is_right:
                self._free_places.append(place)
                saved.place, saved.reading = None, False
            else:
                self._free.append(_host_of(saved))
                saved.host = None
                self._filed[saved.key] = self._entries_of(saved).pop(saved.key)
        if not self._file.num_blocks:
            self._free_places.clear()


def _host_of(saved: _Saved | None) -> int:
    assert saved is not None
    assert saved.host is not None
    return saved.host

"""Swapped KV blocks in a file without a name, copied in the background."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO

from sametoken.errors import ConfigError, in_words

#: Seconds after which a copy hangs: requests wait for it, and those behind them.
MOST_SECONDS = 30.0

logger = logging.getLogger(__name__)


def opened_in(directory: str) -> FileIO:
    """A file without a name in a directory.

    Raises:
        ConfigError: the directory cannot hold it.
    """
    try:
        return tempfile.TemporaryFile(dir=directory, buffering=0)
    except OSError as error:
        raise ConfigError(
            f"swap_dir {directory} cannot hold a file ({in_words(error)})",
            "name a directory on a disk",
        ) from error


class SwapFile:
    """Places for blocks in one file, which nobody else can open and which ends with the process.

    It has no name from the start, so nothing is left on the disk whichever way the process ends.
    A block is checked when it is read: its length, and its digest. If the file cannot be read or
    written, or a copy hangs, one warning says so, and no block goes there any more.

    Args:
        directory: a directory on the disk.
        num_blocks: places.
        buffer: the memory of a host block; all have one length.

    Attributes:
        num_blocks: places; 0 once the file has failed.

    Raises:
        ConfigError: the directory cannot hold the file.
    """

    def __init__(
        self, directory: str, num_blocks: int, buffer: Callable[[int], memoryview]
    ) -> None:
        self.num_blocks = num_blocks
        self._buffer = buffer
        self._digests: dict[int, bytes] = {}
        self._finished: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        # Places whose copies have not been seen to end, and since when none of them has.
        self._under_way: set[int] = set()
        self._since = 0.0
        self._hangs = False
        self._lock = threading.Lock()
        self._file = opened_in(directory)
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)
        # The end of the process does not wait for a disk that hangs.
        own = (self._jobs, self._file)
        threading.Thread(target=_work, args=own, name="swap-file", daemon=True).start()

    def write(self, place: int, host_block: int) -> None:
        """Start to copy a host block to a place."""
        self._begin(self._write, place, host_block)

    def read(self, place: int, host_block: int) -> None:
        """Start to copy a place to a host block."""
        self._begin(self._read, place, host_block)

    def finished(self, *, wait: bool = False) -> Sequence[tuple[int, bool]]:
        """Places whose copies have ended since the last call, and whether they are right.

        If one hangs, all that are under way have ended, and are wrong.

        Args:
            wait: return at least one.
        """
        ended: list[tuple[int, bool]] = []
        deadline = self._since + MOST_SECONDS
        with contextlib.suppress(queue.Empty):
            ended.append(self._finished.get(wait, max(0.0, deadline - time.monotonic())))
            while True:
                ended.append(self._finished.get_nowait())
        if not ended and self._under_way and time.monotonic() >= deadline:
            ended = self._give_up()
        if ended:
            self._under_way -= {place for place, _ in ended}
            self._since = time.monotonic()
        return ended

    def _begin(self, copy: Callable[[int, memoryview], bool], place: int, host_block: int) -> None:
        if not self._under_way:
            self._since = time.monotonic()
        self._under_way.add(place)
        if self._hangs:
            self._finished.put((place, False))
        else:
            self._jobs.put(partial(self._run, copy, place, self._buffer(host_block)))

    def _give_up(self) -> list[tuple[int, bool]]:
        """End all copies: what the worker still does has no effect."""
        with self._lock:
            self._hangs = True
            # One that has ended since ``finished`` looked is among them.
            self._finished = queue.SimpleQueue()
        self._fail(f"no copy has ended in {MOST_SECONDS:g} s")
        return [(place, False) for place in self._under_way]

    def _run(self, copy: Callable[[int, memoryview], bool], place: int, block: memoryview) -> None:
        is_right = False
        try:
            is_right = copy(place, block)
        except (OSError, MemoryError) as error:
            self._fail(in_words(error) or "no memory to read into")
        finally:
            with self._lock:
                if not self._hangs:
                    self._finished.put((place, is_right))

    def _write(self, place: int, block: memoryview) -> bool:
        if not self.num_blocks:
            return False
        self._digests[place] = _digest(block)
        done = 0
        while done < len(block):
            done += os.pwrite(self._file.fileno(), block[done:], place * len(block) + done)
        return True

    def _read(self, place: int, block: memoryview) -> bool:
        data = bytearray()
        while len(data) < len(block):
            start = place * len(block) + len(data)
            part = os.pread(self._file.fileno(), len(block) - len(data), start)
            if not part:
                break
            data += part
        is_right = len(data) == len(block) and _digest(data) == self._digests[place]
        if not is_right:
            self._fail("a block was read that is not what was written")
            return False
        with self._lock:
            # If it comes too late, the host block is another one's.
            if not self._hangs:
                block[:] = data
        return True

    def _fail(self, cause: str) -> None:
        """Say once that the file is not used any more."""
        if self.num_blocks:
            self.num_blocks = 0
            logger.warning("the swap file is not used any more (%s); requests run without", cause)


def _work(jobs: queue.SimpleQueue[Callable[[], object] | None], file: FileIO) -> None:
    with file:
        while (job := jobs.get()) is not None:
            job()
            # While this waits it holds no file, which ends with its last reference.
            del job


def _digest(block: memoryview | bytearray) -> bytes:
    return hashlib.blake2b(block, digest_size=16).digest()

"""Finished results on disk, so that a run that ends early goes on where it stood."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

from sametoken.errors import ConfigError

_SETTINGS = "settings.json"
_PARTS = "part-*.jsonl"


class _Place(NamedTuple):
    """Where a result stands: offset and length in bytes."""

    path: Path
    offset: int
    length: int


class Journal:
    """A directory of part files; every run writes one of its own, by appending alone.

    A record is one line: a checksum, the key, the result. ``append`` returns once its records
    are on the disk, so what is found later was finished. A record that a crash cut short fails
    its checksum and counts as not there. One process at a time holds the directory.

    Args:
        directory: made if it is not there.
        settings: what results depend on; JSON values.

    Raises:
        ConfigError: another process holds the directory, or its results were made under
            other settings.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / "lock").open("wb")
        try:
            self._hold()
            self._require_settings(dict(settings))
        except BaseException:
            self._lock.close()
            raise
        parts = sorted(directory.glob(_PARTS))
        # Of a result that two parts hold, one is taken: that of the earliest run.
        self._places: dict[str, _Place] = {}
        for part in parts:
            for key, place in _records_in(part):
                self._places.setdefault(key, place)
        self._path = directory / f"part-{len(parts):05}.jsonl"
        self._part: BinaryIO = self._path.open("xb")
        sync_directory(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._part.close()
        self._lock.close()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> bytes:
        """The result under a key."""
        path, offset, length = self._places[key]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def append(self, results: Iterable[tuple[str, bytes]]) -> None:
        """Record finished results by key, for good; one that is there already stays."""
        for key, result in results:
            if key in self._places:
                continue
            record = f"{key} ".encode() + result
            head = f"{zlib.crc32(record):08x} "
            start = self._part.tell() + len(head) + len(key) + 1
            self._part.write(head.encode() + record + b"\n")
            self._places[key] = _Place(self._path, start, len(result))
        self._part.flush()
        os.fsync(self._part.fileno())

    def remove(self) -> None:
        """Remove the directory, at once; its results are elsewhere now."""
        gone = self._directory.with_name(self._directory.name + ".gone")
        shutil.rmtree(gone, ignore_errors=True)
        self._directory.rename(gone)
        shutil.rmtree(gone)

    def _hold(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another run holds {self._directory}", "wait for its end, or choose another output"
            ) from error

    def _require_settings(self, settings: dict[str, Any]) -> None:
        path = self._directory / _SETTINGS
        if not path.exists():
            write_whole(path, [json.dumps(settings).encode()])
            return
        found = json.loads(path.read_bytes())
        for name, value in settings.items():
            if found.get(name) != value:
                raise ConfigError(
                    f"{self._directory} holds results of a run with {name}={found.get(name)!r}, "
                    f"and this one has {value!r}",
                    "go on with the same settings, or remove the directory",
                )


def write_whole(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file so that under its name there is all of it or nothing, whatever happens."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for line in lines:
            file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Have the names in a directory survive a crash."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _records_in(part: Path) -> Iterator[tuple[str, _Place]]:
    offset = 0
    with part.open("rb") as file:
        for line in file:
            checksum, _, record = line.rstrip(b"\n").partition(b" ")
            key, _, result = record.partition(b" ")
            if line.endswith(b"\n") and checksum == b"%08x" % zlib.crc32(record):
                start = offset + len(checksum) + len(key) + 2
                yield key.decode(), _Place(part, start, len(result))
            offset += len(line)

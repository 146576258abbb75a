"""A journal of finished results on disk, from which an interrupted run is resumed."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

from sametoken.errors import ConfigError, in_words
from sametoken.io.files import DirectoryLock, is_there, replacing, sync
from sametoken.io.json_text import parse_json

_SETTINGS = "settings.json"
_PARTS = "part-*.jsonl"
_START_AGAIN = "remove the directory to have every line answered again"


class _Location(NamedTuple):
    """A result's file, and its offset and length in bytes."""

    path: Path
    offset: int
    length: int


class Journal:
    """A directory of append-only part files, one per run.

    A record is one line: a checksum, the key, the result. ``append`` returns once its records
    are synced to disk. A record that a crash or a full disk cut short fails its checksum and is
    ignored. One process at a time holds the directory.

    Args:
        directory: created if missing.
        settings: the settings that results depend on, and the format of keys and results; JSON
            values.

    Raises:
        ConfigError: another process holds the directory, it cannot be written, its results
            were made with other settings, or part of it is missing.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self._directory = directory
        self._locations: dict[str, _Location] = {}
        self._is_new = not is_there(directory)
        with contextlib.ExitStack() as opened:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                opened.enter_context(
                    DirectoryLock(directory, "wait for that run's end, or choose another output")
                )
                parts = self._find_parts()
                self._read(parts)
                self._require_settings(dict(settings))
                self._path = directory / f"part-{len(parts):05}.jsonl"
                # Unbuffered: a failed write must not be repeated when the file is closed.
                self._part = opened.enter_context(self._path.open("xb", buffering=0))
                # Makes the new part's name survive a crash.
                sync(directory)
            except OSError as error:
                raise _unusable(directory, error) from error
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Let the directory go; one that this run made and put no result into is removed."""
        with self._opened:
            if self._is_new and not self._locations:
                with contextlib.suppress(ConfigError):
                    self.remove()

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, key: str) -> bool:
        return key in self._locations

    def __getitem__(self, key: str) -> bytes:
        """The result under a key."""
        path, offset, length = self._locations[key]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def append(self, results: Iterable[tuple[str, bytes]]) -> None:
        """Record finished results by key, durably; existing keys keep their results.

        Raises:
            ConfigError: they cannot be written; earlier records stay.
        """
        whole = self._part.tell()
        text, locations = bytearray(), dict[str, _Location]()
        for key, result in results:
            if key in self._locations or key in locations:
                continue
            record = f"{key} ".encode() + result
            head = f"{zlib.crc32(record):08x} "
            start = whole + len(text) + len(head) + len(key) + 1
            text += head.encode() + record + b"\n"
            locations[key] = _Location(self._path, start, len(result))
        try:
            _write_all(self._part, text)
            os.fsync(self._part.fileno())
        except BaseException as error:
            # Drop the incomplete record, if the disk allows it.
            with contextlib.suppress(OSError):
                self._part.truncate(whole)
                self._part.seek(whole)
            if isinstance(error, OSError):
                raise _unusable(self._path, error) from error
            raise
        self._locations |= locations

    def remove(self) -> None:
        """Remove the directory atomically, once its results are in the output.

        Raises:
            ConfigError: it cannot be removed.
        """
        gone = self._directory.with_name(self._directory.name + ".gone")
        shutil.rmtree(gone, ignore_errors=True)
        try:
            self._directory.rename(gone)
            self._is_new = False
            shutil.rmtree(gone)
        except OSError as error:
            raise ConfigError(
                f"{self._directory} cannot be removed ({in_words(error)})",
                "remove it; the output is complete",
            ) from error

    def _find_parts(self) -> list[Path]:
        """The parts of earlier runs, the earliest first."""
        found = set(self._directory.glob(_PARTS))
        parts = [self._directory / f"part-{i:05}.jsonl" for i in range(len(found))]
        for part in parts:
            if part not in found or not part.is_file():
                raise ConfigError(
                    f"{part} is missing, and {self._directory} holds parts of later runs",
                    f"put it back, or {_START_AGAIN}",
                )
        return parts

    def _read(self, parts: Iterable[Path]) -> None:
        # If two parts hold a result, the earliest run's is used.
        for part in parts:
            for key, location in _records_in(part):
                self._locations.setdefault(key, location)

    def _require_settings(self, settings: dict[str, Any]) -> None:
        path = self._directory / _SETTINGS
        if not self._locations:
            write_whole(path, [json.dumps(settings).encode()])
            return
        try:
            if not path.is_file():
                raise ValueError("it is missing")
            found = parse_json(path.read_bytes())
            if not isinstance(found, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            raise ConfigError(
                f"{path} does not hold the settings of the results beside it ({error})",
                _START_AGAIN,
            ) from error
        for name in settings | found:
            theirs, ours = found.get(name), settings.get(name)
            if theirs != ours:
                raise ConfigError(
                    f"{self._directory} holds results of a run with {name}={theirs!r}, "
                    f"and this one has {ours!r}",
                    "go on with the same settings, or remove the directory",
                )


def write_whole(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file atomically and durably, packed with gzip if its name ends in .gz.

    Raises:
        ConfigError: it cannot be written.
    """
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with replacing(path, synced=True) as unfinished, open_file(unfinished, "wb") as file:
            file.writelines(line + b"\n" for line in lines)
        sync(path.parent)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> ConfigError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room there" if is_full else "make it writable"
    return ConfigError(
        f"{path} cannot be used ({in_words(error)})",
        f"{remedy}, or choose another output; the same command resumes the run",
    )


def _write_all(file: FileIO, text: bytearray) -> None:
    left = memoryview(text)
    while left:
        left = left[file.write(left) :]


def _records_in(part: Path) -> Iterator[tuple[str, _Location]]:
    offset = 0
    with part.open("rb") as file:
        for line in file:
            checksum, _, record = line.rstrip(b"\n").partition(b" ")
            key, _, result = record.partition(b" ")
            is_whole = line.endswith(b"\n") and key.isalnum()
            if is_whole and checksum == b"%08x" % zlib.crc32(record):
                start = offset + len(checksum) + len(key) + 2
                yield key.decode("ascii"), _Location(part, start, len(result))
            offset += len(line)

"""Safe file access: reads of regular files within a size limit, and atomic writes."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic_core import from_json

#: A weight map of 200,000 tensors has half of it.
MAX_JSON_BYTES = 2**25


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, or a link to one; never waits, as a pipe would.

    Raises:
        OSError: there is none, or it is a directory, a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: as ``open_regular``.
        ValueError: it is too large, not UTF-8, not JSON, nested deeper than 200, or holds a
            number of more than 4300 digits.
    """
    with open_regular(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {MAX_JSON_BYTES} bytes")
    # Unlike elsewhere, infinities are taken: configs of Mamba-2 models hold them.
    return from_json(data)


def is_there(path: Path) -> bool:
    """Whether the folder has an entry of this name, were it a link to nowhere."""
    return os.path.lexists(path)


@contextlib.contextmanager
def replacing(path: Path, *, synced: bool = False, shared: bool = False) -> Iterator[Path]:
    """Replace a file atomically by the one that the block writes.

    Yields the path of a temporary file beside ``path``. It is renamed at the end of the block,
    or removed if the block raises, which leaves the old file as it was.

    Args:
        path: the file to create or replace.
        synced: the content is on the disk before the rename.
        shared: other processes may write the same file, so the temporary name is unique.
            Otherwise it is fixed, so that what a crash leaves is overwritten by the next write.

    Raises:
        OSError: the file cannot be written.
    """
    name = f".{path.name}.{uuid.uuid4().hex}" if shared else f"{path.name}.tmp"
    unfinished = path.with_name(name)
    try:
        yield unfinished
        if synced:
            sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a directory, to the disk.

    Raises:
        OSError: it cannot be opened or flushed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

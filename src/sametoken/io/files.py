"""Safe file access: bounded reads of regular files, atomic writes, and directory locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Self

from pydantic_core import from_json

from sametoken.errors import ConfigError, in_words

#: Twice the size of a weight map of 200,000 tensors.
MAX_JSON_BYTES = 2**25
_IRREGULAR = "it is not a regular file"
#: How the text begins that Git LFS leaves in the place of a large file.
_POINTER = b"version https://git-lfs.github.com/"


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading; never blocks, as a pipe would.

    Raises:
        OSError: it is missing, or is a directory, a pipe, a socket or a device, or Git LFS has not
            brought its content.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(_IRREGULAR)
        if os.pread(descriptor, len(_POINTER), 0) == _POINTER:
            raise OSError("it is a pointer of Git LFS: run git lfs pull in its directory")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def copied(path: Path) -> Iterator[Path]:
    """A copy of a regular file that nobody else writes to, by its path, until the block ends.

    It is in memory, or on other systems than Linux in the directory of temporary files.

    Raises:
        OSError: as ``open_regular``, or there is not so much room.
    """
    copy: IO[bytes]
    with open_regular(path) as file, contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            copy = stack.enter_context(open(os.memfd_create(path.name), "wb"))
            place = f"/proc/self/fd/{copy.fileno()}"
        else:
            copy = stack.enter_context(tempfile.NamedTemporaryFile())
            place = copy.name
        shutil.copyfileobj(file, copy)
        copy.flush()
        yield Path(place)


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: as ``open_regular``.
        ValueError: it is too large, not UTF-8, not JSON, nested deeper than 200 levels, or holds
            a number of more than 4300 digits.
    """
    with open_regular(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {MAX_JSON_BYTES} bytes")
    # Infinities are allowed here: configs of Mamba-2 models hold them.
    return from_json(data)


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before there is anything to write.

    Raises:
        ConfigError: it is a directory, a device or a pipe, has no directory, or may not be
            written.
    """
    why = _unwritable(path)
    if why:
        raise ConfigError(f"{path} cannot be written ({why})", "choose another file")


def _unwritable(path: Path) -> str:
    """Why a file cannot be written, or an empty text."""
    try:
        if path.is_dir():
            return "it is a directory"
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}"
        if path.exists() and not path.is_file():
            return _IRREGULAR
        may = os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:
        return in_words(error)
    return "" if may else "permission denied"


def make_directory(path: Path) -> None:
    """Make a directory that is to hold results, before there are any.

    Raises:
        ConfigError: it cannot be made, or is a file.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made ({in_words(error)})", "choose another directory"
        ) from error


def is_there(path: Path) -> bool:
    """Whether the directory has an entry of this name, even a broken link."""
    return os.path.lexists(path)


@contextlib.contextmanager
def replacing(path: Path, *, synced: bool = False, shared: bool = False) -> Iterator[Path]:
    """Replace a file atomically by the one that the block writes.

    Yields the path of a temporary file beside ``path``. It is renamed at the end of the block,
    or removed if the block raises, which leaves the old file unchanged.

    Args:
        path: the file to create or replace.
        synced: flush the content to the disk before the rename.
        shared: other processes may write the same file, so the temporary name is unique.
            Otherwise it is fixed, so that the next write overwrites what a crash left.

    Raises:
        OSError: the file cannot be written, or ``path`` is a device, a pipe or a directory.
    """
    # A rename would put a file in the place of /dev/null.
    if path.exists() and not path.is_file():
        raise OSError(_IRREGULAR)
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


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; a link stays, and the file that it names is written.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with replacing(Path(os.path.realpath(path)), shared=True) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({in_words(error)})", "make room, or choose another name"
        ) from error


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk.

    Raises:
        OSError: it cannot be opened or flushed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCK = ".lock"
_SHOWN_HOLDER = 200


class DirectoryLock:
    """Locks a directory until it is closed, or the process ends for any reason.

    The lock is a ``flock`` on the file ``.lock``, which is never removed and names its last
    holder. Child processes do not inherit it.

    Args:
        directory: an existing directory.
        remedy: what a user can do if another process holds it.

    Raises:
        ConfigError: another process or object holds the directory, or it cannot be locked.
    """

    def __init__(self, directory: Path, remedy: str) -> None:
        path = directory / LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            self._close = weakref.finalize(self, os.close, descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(_IRREGULAR)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _own_name().encode(), 0)
        except BlockingIOError as error:
            holder = _name_in(descriptor)
            raise ConfigError(f"{directory} is held by {holder}", remedy) from error
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be locked ({in_words(error)})",
                "choose a directory that can be written, on a file system with locks",
            ) from error

    def close(self) -> None:
        """Release the lock."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _own_name() -> str:
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {began}"


def _name_in(descriptor: int) -> str:
    """The lock holder named in the file, made printable: any process may have written it."""
    text = os.pread(descriptor, _SHOWN_HOLDER, 0).decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text) or "another process"

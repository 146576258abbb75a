"""One writer at a time in a directory, told apart by a lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from sametoken.errors import ConfigError

LOCK = ".lock"
_SHOWN_HOLDER = 200


class DirectoryLock:
    """Holds a directory until it is closed, or its process ends in whatever way.

    The kernel holds the lock (``flock``), on the file ``.lock``, which stays where it is and
    says who took it last. Processes that are started meanwhile do not inherit it.

    Args:
        directory: an existing one.
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
                raise OSError("it is no regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _own_name().encode(), 0)
        except BlockingIOError as error:
            holder = _name_in(descriptor)
            raise ConfigError(f"{directory} is held by {holder}", remedy) from error
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be locked ({error})",
                "choose a directory that can be written, on a file system with locks",
            ) from error

    def close(self) -> None:
        """Let others have the directory."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _own_name() -> str:
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {began}"


def _name_in(descriptor: int) -> str:
    """Who the file says took the lock; anybody may have written there."""
    text = os.pread(descriptor, _SHOWN_HOLDER, 0).decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text) or "another process"

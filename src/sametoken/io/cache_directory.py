"""Where things are kept between runs: fetched models and compiled kernels."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sametoken.errors import ConfigError

CACHE_VARIABLE = "SAMETOKEN_CACHE"
SHARED_VARIABLE = "XDG_CACHE_HOME"


def cache_directory() -> Path:
    """``$SAMETOKEN_CACHE``, else a folder in ``$XDG_CACHE_HOME`` or in the home's ``.cache``.

    Raises:
        ConfigError: a ``~`` stands for a home that is not known.
    """
    if own := os.environ.get(CACHE_VARIABLE):
        return expanded(own)
    return expanded(os.environ.get(SHARED_VARIABLE) or "~/.cache") / "sametoken"


def make_cache_directory() -> Path:
    """The cache directory, which nobody else may enter if it is made now.

    Raises:
        ConfigError: as ``cache_directory``.
        OSError: it cannot be made.
    """
    directory = cache_directory()
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def expanded(path: str) -> Path:
    """A path with the home in place of a ``~`` at its beginning.

    Raises:
        ConfigError: the home is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"no home directory is known for {path}", "write the path out, or set HOME"
        ) from error


def foreign_hands(path: Path) -> str | None:
    """Why code in a file or directory might be somebody else's; None if it is one's own.

    Owned by this user or root, writable by the owner alone, and not a symbolic link.

    Raises:
        OSError: it cannot be examined.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if found.st_uid not in (os.geteuid(), 0):
        return f"user {found.st_uid} owns it"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others than its owner may write it"
    return None

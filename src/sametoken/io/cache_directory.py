"""The cache directory for downloaded models and compiled kernels."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sametoken.errors import ConfigError

CACHE_VARIABLE = "SAMETOKEN_CACHE"
SHARED_VARIABLE = "XDG_CACHE_HOME"


def cache_directory() -> Path:
    """``$SAMETOKEN_CACHE``, else ``sametoken`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.

    Raises:
        ConfigError: the home directory that ``~`` stands for is unknown.
    """
    if own := os.environ.get(CACHE_VARIABLE):
        return expanded(own)
    return expanded(os.environ.get(SHARED_VARIABLE) or "~/.cache") / "sametoken"


def make_cache_directory() -> Path:
    """The cache directory, created with mode 0700 if it does not exist.

    Raises:
        ConfigError: as ``cache_directory``.
        OSError: it cannot be created.
    """
    directory = cache_directory()
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def expanded(path: str) -> Path:
    """A path with a leading ``~`` expanded.

    Raises:
        ConfigError: the home directory is unknown.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"no home directory is known for {path}", "write the path out, or set HOME"
        ) from error


def untrusted_reason(path: Path) -> str | None:
    """Why code in a file or directory must not be trusted, or None.

    Trusted: owned by this user or root, writable by the owner only, not a symbolic link.

    Raises:
        OSError: the path cannot be examined.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if found.st_uid not in (os.geteuid(), 0):
        return f"user {found.st_uid} owns it"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "users other than its owner may write it"
    return None

"""What a training leaves beside the weights: its settings and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sametoken.core.directory_lock import DirectoryLock
from sametoken.errors import ConfigError

RESULT = "training.json"


@contextmanager
def output_directory(directory: Path) -> Iterator[None]:
    """Make the output directory and hold it for one training.

    Raises:
        ConfigError: it cannot be made, or another training writes to it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error})", "choose another output"
        ) from error
    with DirectoryLock(directory, "wait for that training's end, or choose another output"):
        yield


def write_result(directory: Path, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Write ``training.json``.

    Raises:
        ConfigError: the directory cannot be written.
    """
    text = json.dumps({"settings": settings, "result": result}, indent=2) + "\n"
    try:
        (directory / RESULT).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{directory / RESULT} cannot be written ({error})", "choose another output"
        ) from error

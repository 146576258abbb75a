"""JSON files that are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sametoken.core.files import replacing
from sametoken.core.json_text import parse_json
from sametoken.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Write a file in one move: nobody ever reads half of it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, shared=True) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.chmod(0o644)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error})", "give another path") from error


def write_json(path: Path, value: Any) -> None:
    """``write_text`` of a value that JSON knows.

    Raises:
        ConfigError: it cannot be written.
    """
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        ConfigError: the file cannot be read or holds no JSON object.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error})", "give a file that bench wrote"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", "give a file that bench wrote")
    return value

"""Parsing of untrusted JSON."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from sametoken.errors import ConfigError, in_words

#: Maximum bytes of a line, so that an endless line cannot exhaust memory.
MAX_LINE_BYTES = 64 * 2**20
_REMEDY = "give a file with one JSON value per line, in UTF-8"


class NotFiniteError(ValueError):
    """A number is NaN, an infinity, or beyond a float's range."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Nesting is limited to 200 levels, so that code that recurses into the value or serializes it
    does not overflow the stack.

    Raises:
        NotFiniteError: a number is not finite.
        ValueError: the text is not JSON, not UTF-8, nested deeper, or holds a number of more than
            4300 digits or a lone surrogate.
    """
    value = from_json(text)
    try:
        # The parser makes an infinity of 1e400, whatever it is told of infinities.
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise NotFiniteError("a number is not finite") from error
    return value


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, JSON value) for each line of a file that is not blank.

    A file whose name ends in .gz is decompressed.

    Raises:
        ConfigError: the file cannot be read, or a line is not JSON.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = iter(partial(file.readline, MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"line {number} of {path} has more than {MAX_LINE_BYTES} bytes",
                        _REMEDY,
                    )
                if line.strip():
                    yield number, _value(path, number, line)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read ({in_words(error)})", _REMEDY) from error


def _value(path: Path, number: int, line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise ConfigError(f"line {number} of {path} is not JSON ({error})", _REMEDY) from error

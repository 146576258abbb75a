"""Values that a user gives for options: their form and types, before their meaning."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from sametoken.errors import ConfigError, shown

# Bytes of a path and of one name in it, as Linux has them.
_MAX_PATH, _MAX_NAME = 4095, 255
# What a field takes, by its annotation: a name and the types.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("bool", (bool,)),
    "int": ("int", (int,)),
    "int | None": ("int", (int,)),
    "float": ("float", (int, float)),
    "str": ("str", (str,)),
    "str | None": ("str", (str,)),
    "float | None": ("float", (int, float)),
    "tuple[float, ...] | None": ("list of numbers", (list, tuple)),
    "tuple[int, ...] | None": ("list of numbers", (list, tuple)),
}


def json_object(text: str) -> Mapping[str, Any]:
    """The speculative config that a JSON text holds.

    Raises:
        ConfigError: it is not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Besides what is no JSON: numbers of thousands of digits, and brackets within brackets.
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(
            f"speculative config is not JSON: {getattr(error, 'msg', error)}{where}",
            'give an object such as {"method": "ngram", "num_speculative_tokens": 5}',
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("speculative config is not a JSON object", "wrap it in braces")
    return value


def typed(name: str, annotation: Any, given: Any) -> Any:
    """A value for a field, if it is of the field's type; a list becomes a tuple.

    Args:
        name: of the field, for the error.
        annotation: of the field, as text.
        given: the value.

    Raises:
        ConfigError: it is of another type.
    """
    expected, types = _TYPES[annotation]
    members = given if isinstance(given, list | tuple) else ()
    if (
        not isinstance(given, types)
        or (isinstance(given, bool) and bool not in types)
        or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in members)
    ):
        raise ConfigError(
            f"{name}={shown(given)} is of the wrong type", f"give a value of type {expected}"
        )
    return tuple(members) if isinstance(given, list) else given


def require_types(config: Any, prefix: str = "") -> None:
    """Check the type of every field of a dataclass; None passes where it is the default.

    Args:
        config: its fields' annotations are among those known; others are left alone.
        prefix: what an error puts before a field's name.

    Raises:
        ConfigError: naming the first field of another type.
    """
    for one in fields(config):
        value = getattr(config, one.name)
        if one.type in _TYPES and not (value is None and one.default is None):
            object.__setattr__(config, one.name, typed(prefix + one.name, one.type, value))


def require_within(config: Any, limits: Iterable[tuple[str, float, float]]) -> None:
    """Check numbers of a dataclass; each limit is a field's name, its least and its most.

    Raises:
        ConfigError: naming the first field outside its limits.
    """
    for name, low, high in limits:
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(
                f"{name}={value!r} is not possible", f"use a number from {low} to {high}"
            )


def require_path(name: str, given: str | None) -> None:
    """Refuse a text that names no file on any machine.

    Raises:
        ConfigError: it holds a NUL or half of a character, or is too long.
    """
    try:
        path = os.fsencode(given or "")
    except UnicodeEncodeError:
        path = b"\0"
    longest = max(map(len, path.split(b"/")))
    if b"\0" in path or len(path) > _MAX_PATH or longest > _MAX_NAME:
        raise ConfigError(f"{name}={shown(given)} is no path", "give the path of a file")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The remedy for a name that is not known: the closest one, or all."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"

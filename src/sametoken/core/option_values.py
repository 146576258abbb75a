"""Values that a user gives for options: their form and types, before their meaning."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from sametoken.errors import ConfigError

# What a field takes, by its annotation: a name and the types.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
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
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"speculative config is not JSON: {error.msg} at column {error.colno}",
            'give an object such as {"method": "ngram", "num_speculative_tokens": 5}',
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("speculative config is not a JSON object", "wrap it in braces")
    return value


def typed(key: str, annotation: Any, given: Any) -> Any:
    """The value for a key of a speculative config; a list becomes a tuple.

    Args:
        key: names it in the error.
        annotation: of the field, as text.
        given: the value.

    Raises:
        ConfigError: it is of another type.
    """
    name, types = _TYPES[annotation]
    members = given if isinstance(given, list | tuple) else ()
    if (
        not isinstance(given, types)
        or isinstance(given, bool)
        or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in members)
    ):
        raise ConfigError(
            f"speculative config: {key}={given!r} is of the wrong type",
            f"give a value of type {name}",
        )
    return tuple(members) if isinstance(given, list) else given


def suggestion(name: str, known: Iterable[str]) -> str:
    """The remedy for a name that is not known: the closest one, or all."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"

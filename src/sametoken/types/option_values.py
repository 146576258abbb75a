"""Checks of option values: types, ranges, choices, paths and JSON."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from sametoken.errors import ConfigError, RequestError, shown

_T = TypeVar("_T")
# Linux limits in bytes: a path, and one name in it.
_MAX_PATH, _MAX_NAME = 4095, 255
# Annotation to the name and the types that a field accepts.
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


def option(
    default: Any,
    text: str,
    *spellings: str,
    choices: Sequence[str] = (),
    limits: tuple[float, float] | None = None,
    methods: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field with what the CLI and the docs say about it.

    Args:
        default: the default.
        text: the help text.
        spellings: flags beside the field's own name on the command line.
        choices: the allowed values of a text.
        limits: the least and the greatest allowed number.
        methods: speculative methods that read the option.
        secret: whether the value is left out where the dataclass is printed.
    """
    metadata = {
        "help": text,
        "spellings": spellings,
        "choices": choices,
        "limits": limits,
        "methods": methods,
    }
    return field(default=default, metadata=metadata, repr=not secret)


def json_object(text: str, name: str, example: str) -> Mapping[str, Any]:
    """Parse an option from JSON text.

    Args:
        text: the option's value.
        name: the option, for the error.
        example: a right value.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Also raised for integers of thousands of digits and for deep nesting.
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(
            f"{name} is not JSON: {getattr(error, 'msg', error)}{where}",
            f"give an object such as {example}",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is not a JSON object", "wrap it in braces")
    return value


def from_json(config: type[_T], text: str, name: str, example: str) -> _T:
    """A dataclass of options from JSON text; arguments are as for ``json_object``.

    Raises:
        ConfigError: it is no JSON object, a key is unknown, or a value is impossible.
    """
    given = json_object(text, name, example)
    known = [one.name for one in fields(config)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise ConfigError(f"{name} has the unknown key {shown(key)}", suggestion(key, known))
    return config(**given)


def typed(name: str, annotation: Any, given: Any) -> Any:
    """Return a value if it has the type of the field of that name; a list becomes a tuple.

    Raises:
        ConfigError: the value has another type.
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
        config: the dataclass; fields with an unknown annotation are skipped.
        prefix: put before the field's name in an error.

    Raises:
        ConfigError: names the first field of a wrong type.
    """
    for one in fields(config):
        value = getattr(config, one.name)
        if one.type in _TYPES and not (value is None and one.default is None):
            object.__setattr__(config, one.name, typed(prefix + one.name, one.type, value))


def require_choices(config: Any) -> None:
    """Refuse a text outside the ``choices`` of its field; None passes where it is the default.

    Raises:
        ConfigError: names the first of these fields, and its choices.
    """
    for one in fields(config):
        value, choices = getattr(config, one.name), one.metadata["choices"]
        is_left_out = value == one.default and value in (None, "")
        if choices and not is_left_out and value not in choices:
            raise ConfigError(f"{one.name}={shown(value)} is not possible", choice(value, choices))


def require_limits(config: Any, skip: Collection[str] = ()) -> None:
    """Refuse a number outside the ``limits`` of its field, except of ``skip``; None passes.

    Raises:
        ConfigError: names the first of these fields, and its limits.
    """
    for one in fields(config):
        value, limits = getattr(config, one.name), one.metadata["limits"]
        if limits is None or value is None or one.name in skip:
            continue
        low, high = limits
        if not low <= value <= high:
            kind = "an integer" if str(one.type).startswith("int") else "a number"
            raise ConfigError(
                f"{one.name}={shown(value)} is not possible", f"use {kind} from {low} to {high}"
            )


def require_least(config: Any, **least: int) -> None:
    """Refuse a number below the least one of its field; None passes.

    Raises:
        ConfigError: names the first of these fields, and its least number.
    """
    for name, low in least.items():
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{name}={value} is not possible", f"use at least {low}")


def require_path(name: str, given: str | None) -> None:
    """Refuse text that cannot be a path.

    Raises:
        ConfigError: it holds a NUL or a lone surrogate, or is too long.
    """
    try:
        path = os.fsencode(given or "")
    except UnicodeEncodeError:
        path = b"\0"
    longest = max(map(len, path.split(b"/")))
    if b"\0" in path or len(path) > _MAX_PATH or longest > _MAX_NAME:
        raise ConfigError(f"{name}={shown(given)} is not a path", "give the path of a file")


#: Values of ``generation_config`` that are no directory.
MODELS_OWN, NO_FILE = "auto", "vllm"
GENERATION_FILE = "generation_config.json"


def require_files(chat_template: str | None, generation_config: str) -> None:
    """Refuse a chat template or a generation config that is not there.

    Raises:
        ConfigError: there is no such file, or the template is empty.
    """
    if chat_template is not None:
        is_file = Path(chat_template).is_file()
        if not is_file or Path(chat_template).stat().st_size == 0:
            fault = "is empty" if is_file else "is not a file"
            raise ConfigError(
                f"chat_template={shown(chat_template)} {fault}", "give a file of Jinja"
            )
    own = generation_config in (MODELS_OWN, NO_FILE)
    if not own and not Path(generation_config, GENERATION_FILE).is_file():
        raise ConfigError(
            f"generation_config={shown(generation_config)} is no directory with a "
            f"{GENERATION_FILE}",
            f"use {MODELS_OWN!r}, {NO_FILE!r}, or such a directory",
        )


#: Factors of a number's last letters: binary in capitals, decimal in small letters, as in vLLM.
_FACTORS = {
    name: base**power
    for power, letter in enumerate("KMGT", start=1)
    for name, base in (
        (letter.lower(), 1000),
        (letter, 1024),
        (f"{letter}i", 1024),
        (f"{letter}iB", 1024),
    )
}
_NUMBER = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")


def parse_integer(given: str | int) -> int:
    """An integer as on the command line: ``32768``, ``32k`` (32000), ``32K``, ``1.5G``, ``4GiB``.

    Raises:
        ValueError: it has another form, or a fraction is left.
    """
    matched = _NUMBER.fullmatch(str(given).strip())
    if matched and (matched[2] in _FACTORS or not matched[2]):
        value = Fraction(matched[1]) * _FACTORS.get(matched[2], 1)
        if value.denominator == 1:
            return int(value)
    raise ValueError(
        f"{given!r} is not a whole number; write it in full, or as 32k (32000), 32K (32768), 4G or "
        "4GiB"
    )


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is the given one's last words, or spelled most alike; None if none is."""
    name, names = name[:_MAX_NAME], list(known)
    ends = [one for one in names if name.endswith(f"_{one}")]
    return max(ends, key=len, default=next(iter(difflib.get_close_matches(name, names, n=1)), None))


def require_known(
    kind: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]
) -> None:
    """Refuse keyword arguments that a request's class does not have.

    Args:
        kind: the class, as the error names it.
        given: names of the arguments.
        known: names of its fields.
        elsewhere: names that other engines have, with what to use instead.

    Raises:
        RequestError: names the argument and its remedy.
    """
    for name in given:
        if name not in known:
            remedy = elsewhere.get(name) or suggestion(name, known)
            raise RequestError(f"{kind} has no {name!r}", remedy, param=name)


def refusing_unknown(elsewhere: Mapping[str, str]) -> Callable[[type[_T]], type[_T]]:
    """A dataclass with slots that refuses unknown arguments as ``require_known`` does."""

    def decorated(cls: type[_T]) -> type[_T]:
        # Not in ``__new__``, which would hide the signature.
        initialize = cls.__init__

        @functools.wraps(initialize)
        def with_known_names(self: _T, *arguments: Any, **given: Any) -> None:
            require_known(cls.__name__, given, cls.__slots__, elsewhere)  # type: ignore[attr-defined]
            initialize(self, *arguments, **given)

        cls.__init__ = with_known_names  # type: ignore[assignment, method-assign]
        return cls

    return decorated


def suggestion(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the closest known name, or all of them."""
    names = list(known)
    close = closest(name, names)
    return f"did you mean {close!r}?" if close is not None else f"known: {', '.join(names)}"


def choice(given: object, allowed: Iterable[str]) -> str:
    """The remedy for an impossible choice: the closest allowed value, and all of them."""
    names = list(allowed)
    close = closest(given, names) if isinstance(given, str) else None
    values = listed(names)
    return f"use {values}" if close is None else f"did you mean {close!r}? Use {values}"


def listed(names: Iterable[str | int]) -> str:
    """Names as in a sentence: ``'a', 'b' or 'c'``."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last

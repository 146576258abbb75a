"""vLLM's forms of a command line as words that our parser reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sametoken.errors import ConfigError
from sametoken.io.json_text import parse_json
from sametoken.types.option_values import parse_integer

#: Flags that take several values at once.
_SEVERAL = ("--served-model-name", "--api-key", "--lora-modules")
#: Other names of flags, and of keys of a flag whose value is a JSON object.
OTHER_NAMES: Mapping[str, str] = {
    "-sc": "--speculative-config",
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
}
#: Values that stand for what our default is.
_DEFAULTS: Mapping[str, tuple[str, ...]] = {"--max-model-len": ("auto", "-1")}


def our_words(words: list[str]) -> list[str]:
    """The words of a command line with dashes in names, an object for a flag's keys, a flag for
    each value, and without defaults.

    Raises:
        ConfigError: a flag's keys contradict each other.
    """
    dashed = [_with_dashes(word) for word in words]
    return _flag_for_each(_object_of_keys(_without_defaults(dashed)))


def _with_dashes(word: str) -> str:
    """A flag with dashes for underscores, in its name alone."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    flag, dot, keys = name.partition(".")
    return flag.replace("_", "-") + dot + keys + equals + value


def _without_defaults(words: list[str]) -> list[str]:
    """Leave out flags whose value is the default."""
    others: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and value in _DEFAULTS.get(name, ()):
            continue
        if others and word in _DEFAULTS.get(others[-1], ()):
            others.pop()
            continue
        others.append(word)
    return others


def _object_of_keys(words: list[str]) -> list[str]:
    """Put ``--flag.key value`` and ``--flag.key.inner value`` together, as one JSON object."""
    others: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        name = OTHER_NAMES.get(name, name)
        flag, *keys = name.split(".")
        if not (keys and flag.startswith("--")):
            others.append(name + equals + value)
            continue
        given = value if equals else next(rest, None)
        if given is None:
            raise ConfigError(f"{name} has no value", f"give one, as in {name}=1")
        _put(objects.setdefault(flag, {}), keys, _value(given), name)
    for flag, value_of in objects.items():
        if any(word.partition("=")[0] == flag for word in others):
            raise ConfigError(f"{flag} is given whole and by keys", "give all keys in one form")
        others += [flag, json.dumps(value_of)]
    return others


def _value(text: str) -> Any:
    """A key's value: JSON, a number with a unit, or a text."""
    for parse in (parse_json, parse_integer):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def _put(values: dict[str, Any], keys: list[str], value: Any, name: str) -> None:
    *outer, last = keys
    for key in outer:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{name} is a key of what has a value", "give one of them")
    if last in values:
        raise ConfigError(f"{name} is given twice", "give it once")
    values[last] = value


def _flag_for_each(words: list[str]) -> list[str]:
    """Repeat a flag of several values before each of them, as in ``--served-model-name A B``.

    Without a model before them the last one may be the model, and the words stay.
    """
    names_model = any(one == "--model" or one.startswith("--model=") for one in words)
    if not names_model and (not words or words[0].startswith("-")):
        return words
    repeated: list[str] = []
    several, num_values = "", 0
    for one in words:
        if one.startswith("-"):
            several, num_values = one if one in _SEVERAL else "", 0
        else:
            num_values += 1
            if several and num_values > 1:
                repeated.append(several)
        repeated.append(one)
    return repeated

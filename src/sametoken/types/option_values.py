"""Checks of option values: types and ranges, drafters that match text, acceptance methods."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from sametoken.errors import ConfigError, shown

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


def json_object(text: str) -> Mapping[str, Any]:
    """Parse a speculative config from JSON text.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Also raised for integers of thousands of digits and for deep nesting.
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(
            f"speculative config is not JSON: {getattr(error, 'msg', error)}{where}",
            'give an object such as {"method": "ngram", "num_speculative_tokens": 5}',
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("speculative config is not a JSON object", "wrap it in braces")
    return value


def typed(name: str, annotation: Any, given: Any) -> Any:
    """Return a value if it has the field's type; a list becomes a tuple.

    Args:
        name: the field's name, for the error.
        annotation: the field's annotation as text.
        given: the value.

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


def require_within(config: Any, limits: Iterable[tuple[str, float, float]]) -> None:
    """Check numbers of a dataclass; each limit is (field name, minimum, maximum).

    Raises:
        ConfigError: names the first field outside its limits.
    """
    for name, low, high in limits:
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(
                f"{name}={value!r} is not possible", f"use a number from {low} to {high}"
            )


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
        ConfigError: there is no such file.
    """
    if chat_template is not None and not Path(chat_template).is_file():
        raise ConfigError(
            f"chat_template={shown(chat_template)} is not a file", "give a file of Jinja"
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


def suggestion(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the closest known name, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


#: Methods that match text, methods with a draft head, methods that a cascade may fall back to.
LOOKUPS = ("ngram", "suffix")
HEADS = ("eagle", "eagle3", "mtp")
CASCADED = ("draft_model", *HEADS)

_SUFFIX_LIMITS = {
    "suffix_decoding_max_tree_depth": (1, 64),
    "suffix_decoding_max_cached_requests": (0, 2**20),
    "suffix_decoding_max_spec_factor": (0, 64),
    "suffix_decoding_min_token_prob": (0, 1),
}


def check_lookups(config: Any, most: int) -> None:
    """Check the suffix options and the cascade of a ``SpeculativeConfig``.

    Args:
        config: a ``SpeculativeConfig``.
        most: maximum drafts per window.

    Raises:
        ConfigError: names the key and its allowed values.
    """
    for name, (low, high) in _SUFFIX_LIMITS.items():
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{name}={shown(value)} is not possible", f"use {low} to {high}")
    if config.cascade is not None:
        _check_cascade(config, most)
    elif config.cascade_model_tokens is not None:
        raise ConfigError("cascade_model_tokens is set without a cascade", 'set "cascade"')


def _check_cascade(config: Any, most: int) -> None:
    lookup, method = config.cascade, config.method
    if lookup not in LOOKUPS or method not in CASCADED:
        raise ConfigError(
            f"cascade {shown(lookup)} with method {method!r} is not possible",
            f"put one of {LOOKUPS} before one of {CASCADED}",
        )
    longest = config.suffix_decoding_max_tree_depth if lookup == "suffix" else 64
    if not 1 <= config.cascade_min_match <= longest:
        raise ConfigError(
            f"cascade_min_match={shown(config.cascade_min_match)} is not possible",
            f"use an integer from 1 to {longest}",
        )
    own, num_tokens = config.num_model_tokens, config.num_speculative_tokens
    if not own <= num_tokens <= most:
        raise ConfigError(
            f"num_speculative_tokens={num_tokens} and cascade_model_tokens={own} are not possible",
            f"use 1 <= cascade_model_tokens <= num_speculative_tokens <= {most}",
        )


KEYED, SYNTHETIC = "keyed", "synthetic"
# Methods of vLLM and others with which speculation changes tokens.
_CHANGES_TOKENS = ("standard", "strict", "probabilistic", "block", "fly")


def check_acceptance(config: Any) -> None:
    """Refuse methods that change tokens, and a missing or wrong synthetic acceptance.

    Args:
        config: a ``SpeculativeConfig``.

    Raises:
        ConfigError: names the key and its allowed values.
    """
    method = config.rejection_sample_method
    if method in _CHANGES_TOKENS:
        raise ConfigError(
            f"rejection_sample_method {method!r} is not offered: its output would differ from "
            "plain decoding",
            f"use {KEYED!r}, which emits the same tokens as plain decoding",
        )
    if method not in (KEYED, SYNTHETIC):
        raise ConfigError(
            f"rejection_sample_method {shown(method)} is not known",
            f"use {KEYED!r} or {SYNTHETIC!r}",
        )
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    num_given = (rates is not None) + (length is not None)
    if method == KEYED and num_given:
        raise ConfigError(
            "synthetic acceptance is set, but drafts are verified by keyed sampling",
            f'set "rejection_sample_method": "{SYNTHETIC}" to measure times, or leave it out',
        )
    if method == SYNTHETIC and num_given != 1:
        raise ConfigError(
            f"synthetic acceptance needs one of rates and length, {num_given} were given",
            "give synthetic_acceptance_rates or synthetic_acceptance_length",
        )
    if rates is not None:
        _check_rates(rates, config.num_speculative_tokens)
    most = config.num_speculative_tokens + 1
    if length is not None and not 1 <= length <= most:
        raise ConfigError(
            f"synthetic_acceptance_length={shown(length)} is not possible",
            f"use a number from 1 to {most}, the drafts and the target's own token",
        )


def _check_rates(rates: Sequence[float], num_drafts: int) -> None:
    falls = all(a >= b for a, b in itertools.pairwise(rates))
    if not rates or not falls or not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(
            f"synthetic_acceptance_rates={shown(list(rates))} are not possible",
            "give numbers from 0 to 1 that never increase",
        )
    if len(rates) > num_drafts:
        raise ConfigError(
            f"{len(rates)} synthetic_acceptance_rates were given for {num_drafts} drafts",
            "give at most one per draft",
        )

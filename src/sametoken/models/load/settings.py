"""Checked access to a checkpoint's settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from sametoken.errors import CheckpointError, UnsupportedError

# Several times any known model's sizes, so that a corrupt file cannot size a table or a loop.
MAX_HEAD_DIM = 2048
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
#: Of other counts: tokens of a vocabulary, features of a row.
MAX_COUNT = 2**22
#: Of positions, which allocate nothing: a request is limited by max_model_len and memory.
MAX_CLAIM = 2**63 - 1
#: Of a number: the largest of 32 bits, in which it is used.
MAX_NUMBER = (2 - 2**-23) * 2.0**127
#: Of a regular expression in a checkpoint: longer, or more repeats or ways to read a name, of which
#: a repeat is taken to have the last number, could take long to match.
_MAX_EXPRESSION, _MAX_REPEATS, _MAX_WAYS, _WAYS_OF_REPEAT = 400, 5, 2**23, 2**4
ANOTHER = "use another checkpoint"
COMPARE = "compare with the original checkpoint's"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
#: Of keys and values, in compressed-tensors' form.
KV_SCHEME = "kv_cache_scheme"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings by key; an absent or null key takes the default, if there is one.

    Attributes:
        location: the file, for messages.
        prefix: prefix of every key.

    Raises:
        CheckpointError: a key is no text; a value is missing or impossible, from every method.
    """

    values: Mapping[str, Any]
    location: str
    prefix: str = ""

    def __post_init__(self) -> None:
        """Refuse what is not from JSON."""
        for key in self.values:
            if not isinstance(key, str):
                raise CheckpointError(f"{self.location}: {short(key)} is no name", COMPARE)

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def switch(self, key: str, *, default: bool = False) -> bool:
        """True or false; some files write 1 or 0."""
        value = self.get(key, default)
        if value not in (True, False):
            raise self._bad(key, value, "true or false")
        return bool(value)

    def integer(self, key: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        """A count from 1 to ``most``."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._bad(key, value, "a positive integer")
        if value > most:
            raise self._bad(key, value, f"at most {most}")
        return value

    def count(self, key: str, default: int = 0, most: int = MAX_COUNT) -> int:
        """A count from 0 to ``most``."""
        return self.integer(key, default, most) if self.get(key, default) else 0

    def positions(self, key: str, default: int | None = None) -> int:
        """A length in tokens, without a limit."""
        return self.integer(key, default, MAX_CLAIM)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, finite in 32 bits."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._bad(key, value, "a number")
        if not 0 < value <= MAX_NUMBER:
            raise self._bad(key, value, "a positive number of 32 bits")
        return float(value)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty by default."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._bad(key, value, "a list of words")
        return tuple(value)

    def nested(self, key: str) -> dict[str, Any]:
        """An object, empty by default."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self._bad(key, value, "an object")
        return value

    def objects(self, key: str) -> dict[str, Settings]:
        """The settings of each object in an object, by name; none by default."""
        found = self.nested(key)
        for name, value in found.items():
            if not isinstance(value, dict):
                raise CheckpointError(
                    f"{self.location}: {short(name)} in {self.prefix}{key} is not an object",
                    COMPARE,
                )
        return {name: Settings(one, f"{self.location}.{name}") for name, one in found.items()}

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Ids below ``vocab_size``, from one number, a list, or an absent key."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self._bad(key, value, f"a token id below {vocab_size} or a list of them")
        return tuple(ids)

    def _bad(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.location}: {self.prefix}{key}={short(value)} is not {wanted}", COMPARE
        )


NO_SETTINGS = Settings({}, "")


def quantization_settings(config: Mapping[str, Any], location: str) -> Settings | None:
    """How a config.json says that its checkpoint is quantized; None if it is not.

    Raises:
        CheckpointError: the key holds no object.
    """
    key = next((key for key in QUANTIZATION_KEYS if config.get(key)), None)
    if key is None:
        return None
    return Settings(Settings(config, location).nested(key), f"{location}: {key}")


def require_head_counts(num_heads: int, num_kv_heads: int, head_dim: int, location: str) -> None:
    """Refuse attention heads that cannot be grouped or rotated.

    Raises:
        CheckpointError: the counts do not divide, or the head size is odd or too large.
    """
    possible = head_dim <= MAX_HEAD_DIM and num_heads * head_dim <= MAX_COUNT
    if num_heads % num_kv_heads or head_dim % 2 or not possible:
        raise CheckpointError(
            f"{location}: {num_heads} heads of size {head_dim} over {num_kv_heads} key-value heads "
            "are not possible",
            COMPARE,
        )


def require_known(
    settings: Settings,
    *,
    used: tuple[str, ...],
    only: Mapping[str, tuple[object, ...]] | None = None,
    unused: tuple[str, ...] = (),
    remedy: str = ANOTHER,
) -> None:
    """Refuse a key that nobody reads, unless it is empty, and a value that nobody implements.

    Args:
        settings: the settings.
        used: keys that the caller reads.
        only: values of keys that mean nothing else.
        unused: keys without a meaning for reading.
        remedy: for the error.

    Raises:
        UnsupportedError: names the key.
    """
    only = only or {}
    for key, value in settings.values.items():
        if key in used or key in unused or value in (None, [], {}, ""):
            continue
        if value not in only.get(key, ()):
            raise unsupported(settings, key, remedy)


def require_values(settings: Settings, only: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse other values of keys than ``only`` those; a key that is absent or null may stay.

    Raises:
        UnsupportedError: names the key.
    """
    for key, values in only.items():
        if settings.get(key) is not None and settings.get(key) not in values:
            raise unsupported(settings, key, ANOTHER)


def require_rope_type(settings: Settings) -> None:
    """Refuse a scaled rope without ``rope_type`` of a class with ropes by layer type.

    transformers passes over its ``type``, and does not scale it.

    Raises:
        UnsupportedError: the config has one.
    """
    scaling = settings.nested("rope_scaling")
    named = "rope_type" in scaling or settings.nested("rope_parameters")
    if scaling.get("type", "default") != "default" and not named:
        remedy = 'give "rope_type" too if it shall be scaled, or leave rope_scaling out'
        raise unsupported(settings, "rope_scaling", remedy)


def compiled(settings: Settings, expression: str) -> re.Pattern[str]:
    """A checkpoint's regular expression; refused where matching could take very long.

    Raises:
        CheckpointError: it is none.
        UnsupportedError: it is too long, or repeats too much.
    """
    nested = re.search(r"\)[*+{]", expression)
    # A long one's ways are a number of many digits.
    if (
        len(expression) > _MAX_EXPRESSION
        or nested
        or _repeats(expression) > _MAX_REPEATS
        or _ways(expression) > _MAX_WAYS
    ):
        raise UnsupportedError(
            f"{settings.location}: the expression {short(expression)} repeats too much",
            "name the modules",
        )
    try:
        return re.compile(expression)
    except (re.error, OverflowError) as error:
        raise CheckpointError(
            f"{settings.location}: {short(expression)} is no regular expression ({error})", COMPARE
        ) from error


def require_quick(settings: Settings, expressions: Iterable[re.Pattern[str]]) -> None:
    """Refuse ``compiled`` expressions that are tried in turn where all could take very long.

    Raises:
        UnsupportedError: they are too many that repeat so much.
    """
    if sum(_ways(one.pattern) for one in expressions) > _MAX_WAYS:
        raise UnsupportedError(
            f"{settings.location}: its expressions repeat too much, one after the other",
            "name the modules",
        )


def _repeats(expression: str) -> int:
    return len(re.findall(r"(?<!\\)[*+{]", expression))


def _ways(expression: str) -> int:
    """An estimate of the ways to read a name that matching may try."""
    ways: int = math.prod(part.count("|") + 1 for part in re.split(r"[()]", expression))
    ways *= 2 ** len(re.findall(r"[^(\\]\?", expression)) * _WAYS_OF_REPEAT ** _repeats(expression)
    return ways


def chosen(settings: Settings, key: str, allowed: tuple[str, ...], default: Any = None) -> str:
    """The value of a key that has one of several; any other is refused by name."""
    value: str = settings.get(key, default)
    if value not in allowed:
        raise unsupported(settings, key, f"use {', '.join(allowed[:-1])} or {allowed[-1]}")
    return value


def unsupported(settings: Settings, key: str, remedy: str) -> UnsupportedError:
    """The error for a key's value that is valid and not implemented."""
    return UnsupportedError(
        f"{settings.location}: {key}={short(settings.get(key))} is not supported", remedy
    )

"""Checked access to a checkpoint's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sametoken.errors import CheckpointError

# Four times what any model has: a damaged file must not size the rotary table.
MAX_HEAD_DIM = 2048


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings by key; a key that is absent or null takes the default, if there is one.

    Attributes:
        location: the file, for messages.
        prefix: what every key begins with.

    Raises:
        CheckpointError: a value is missing or impossible, from every method.
    """

    values: Mapping[str, Any]
    location: str
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A number of things: at least 1."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._bad(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._bad(key, value, "a number")
        if not 0 < value < float("inf"):
            raise self._bad(key, value, "a positive number")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one number, as a list, or not at all."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self._bad(key, value, "a token id or a list of them")
        return tuple(ids)

    def _bad(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.location}: {self.prefix}{key}={value!r} is not {wanted}",
            "compare with the original checkpoint's",
        )


def require_head_counts(num_heads: int, num_kv_heads: int, head_dim: int, location: str) -> None:
    """Refuse heads that cannot be grouped or rotated.

    Raises:
        CheckpointError: the counts do not divide, or the head size is odd or absurd.
    """
    if num_heads % num_kv_heads or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise CheckpointError(
            f"{location}: {num_heads} heads of size {head_dim} over {num_kv_heads} key-value heads "
            "are not possible",
            "compare with the original checkpoint's",
        )

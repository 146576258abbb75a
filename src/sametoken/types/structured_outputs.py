"""Structured outputs: the constraint on a completion's text, and its grammar's interface."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Protocol

from sametoken.errors import RequestError, shown

#: Time budget of a request's masks: a credit, and an allowance added per mask. With 150,000 tokens
#: an ordinary mask takes 1 ms, and JSON's costliest 8 ms.
MASK_CREDIT_S = 0.5
MASK_SECONDS = 0.005


class Matcher(Protocol):
    """The grammar state of one completion; at its end only end-of-text tokens match."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, without advancing, if the grammar refuses it."""
        ...

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        ...

    def fill(self, masks: Any, row: int) -> None:
        """Write the mask of valid next tokens.

        Args:
            masks: [rows, ceil(V / 32)] int32 host tensor; bit i of word w is token 32 w + i.
            row: the row to write.
        """
        ...


class Grammar(Protocol):
    """A grammar over token ids, which the host masks logits with."""

    def is_ready(self) -> bool:
        """Whether ``new_matcher`` returns without delay."""
        ...

    def prepare(self) -> None:
        """Do the slow work of ``new_matcher`` in advance. Any thread may call this.

        Raises:
            SametokenError: the grammar cannot be compiled.
        """
        ...

    def new_matcher(self) -> Matcher:
        """A matcher at the start of a completion."""
        ...


class MaskFault(IntEnum):
    """Why a window has no valid token.

    Attributes:
        NONE: it has one.
        NO_VALID_TOKEN: the grammar and the other masks have no token in common.
        SLOW: computing the grammar's masks exceeded its time limit.
        BROKEN: the grammar library failed, or refused a token that it had allowed.
    """

    NONE = 0
    NO_VALID_TOKEN = 1
    SLOW = 2
    BROKEN = 3


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on a completion's text, with vLLM's names. Exactly one field is set.

    Attributes:
        json_schema: a JSON Schema, as JSON text.
        json_object: True for any JSON object.
        regex: a regular expression that the whole text matches.
        grammar: a GBNF grammar whose rule ``root`` derives the whole text.
        choice: the allowed completions.

    Raises:
        RequestError: none or several are set, or one has the wrong type or is empty.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        names = [one.name for one in fields(self) if self._is_set(one.name)]
        if len(names) != 1:
            found = " and ".join(names) or "nothing"
            raise RequestError(
                f"structured_outputs sets {found}",
                "set exactly one of json_schema, json_object, regex, grammar and choice",
            )
        self._check(names[0], getattr(self, names[0]))

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(one.name for one in fields(self) if self._is_set(one.name))

    def _is_set(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False

    @staticmethod
    def _check(name: str, value: Any) -> None:
        if name == "json_object":
            fits = value is True
        elif name == "choice":
            fits = isinstance(value, tuple) and value != () and all(map(_is_text, value))
        else:
            fits = _is_text(value)
        if not fits:
            cause = f"structured_outputs {name}={shown(value)} is not possible"
            raise RequestError(cause, _FORMS[name])


_FORMS = {
    "json_schema": "give the schema as non-empty JSON text",
    "json_object": "use True or leave it out",
    "regex": "use a non-empty string",
    "grammar": "use a non-empty string",
    "choice": "use a non-empty tuple of non-empty strings",
}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""

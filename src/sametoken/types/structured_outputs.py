"""Structured outputs: the constraint on a completion's text, and its grammar's interface."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from sametoken.errors import RequestError, require_unicode, shown
from sametoken.types.option_values import refusing_unknown

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
class Reasoning:
    """What a completion says before its text: any tokens, up to the end.

    Attributes:
        end: the consecutive tokens that end it.
        header_end: None if it ends with ``end``. Otherwise a header follows, of any tokens except
            ``end[0]``, which would begin another one, and this token ends both.
        begins: tokens of which the first one is one, or there is no reasoning and the constraint
            holds from the first token on. Empty if the prompt has begun the reasoning.
        has_begun: whether the first token is reasoning even if it is none of ``begins``.
        budget: tokens that the reasoning has at most, a first one of ``begins`` not counted; then
            ``end`` is forced. None for any number.
        also_ends: tokens that end it too, each of them the first one of the text.

    Raises:
        RequestError: ``end`` is empty, a value is of the wrong type, or a header has a budget.
    """

    end: tuple[int, ...]
    header_end: int | None = None
    begins: tuple[int, ...] = ()
    has_begun: bool = False
    budget: int | None = None
    also_ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        has_tuples = all(isinstance(one, tuple) for one in (self.end, self.begins, self.also_ends))
        if not has_tuples or not self.end or not all(type(one) is int for one in self.token_ids):
            raise RequestError(
                f"{shown(self)} is not possible", "use tuples of integers, end not empty"
            )
        if self.budget is None:
            return
        if type(self.budget) is not int or self.budget < 0:
            remedy = "use None or an integer of at least 0"
            raise RequestError(f"a budget of {shown(self.budget)} is not possible", remedy)
        if self.header_end is not None:
            cause = "a reasoning that ends with a header has no budget"
            raise RequestError(cause, "leave the budget or header_end out")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that it names."""
        last = () if self.header_end is None else (self.header_end,)
        return (*self.end, *last, *self.begins, *self.also_ends)


#: vLLM's options that are not offered, with what to use instead.
REFUSED = {
    "whitespace_pattern": "use regex or grammar, which say where whitespace stands",
    "disable_any_whitespace": "use regex or grammar, which say where whitespace stands",
    "disable_additional_properties": 'set "additionalProperties": false in the schema',
    "disable_fallback": "leave it out; xgrammar compiles every grammar",
    "backend": "leave it out; xgrammar compiles every grammar",
}
#: The sampling parameter that a constraint is.
PARAM = "structured_outputs"


@refusing_unknown({"json": "use json_schema", **REFUSED})
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on a completion's text. Exactly one kind is set, or a budget of reasoning.

    The names are vLLM's, except that its ``json`` is ``json_schema``.

    Attributes:
        json_schema: a JSON Schema, as JSON text or a dict, such as pydantic's
            ``Model.model_json_schema()``.
        json_object: True for any JSON object.
        regex: a regular expression that the whole text matches.
        grammar: a GBNF grammar whose rule ``root`` derives the whole text.
        choice: the allowed completions.
        structural_tag: as JSON text or a dict, which constraints hold between which marks of the
            text: ``{"type": "structural_tag", "format": ...}`` in xgrammar's format, without what
            is over token ids.
        free_after: a mark; a text that begins with it matches too, whatever follows. None if every
            text is of the kind.
        reasoning: what may stand before the text; None if the text begins with the first token.
            With a budget it may be the only constraint: the text is any.

    Raises:
        RequestError: no kind or several are set, or one has the wrong type or is empty.
    """

    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    reasoning: Reasoning | None = None
    free_after: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("json_schema", "structural_tag"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, _json_text(name, value))
        if not isinstance(self.reasoning, Reasoning | None):
            cause = f"structured_outputs reasoning={shown(self.reasoning)} is not possible"
            raise RequestError(cause, "use Reasoning or leave it out", param=PARAM)
        if self.free_after is not None and not _is_text(self.free_after):
            cause = f"structured_outputs free_after={shown(self.free_after)} is not possible"
            raise RequestError(cause, "use a non-empty string or leave it out", param=PARAM)
        names = [name for name in _FORMS if self._is_set(name)]
        if not names and self.has_any_text and self.free_after is None:
            return
        if len(names) != 1:
            found = " and ".join(names) or "nothing"
            raise RequestError(
                f"structured_outputs sets {found}",
                "set exactly one of json_schema (json over HTTP), json_object, regex, grammar, "
                "choice and structural_tag",
                param=PARAM,
            )
        self._check(names[0], getattr(self, names[0]))

    @property
    def has_any_text(self) -> bool:
        """Whether no kind is set, and a budget of the reasoning is the constraint."""
        is_bounded = self.reasoning is not None and self.reasoning.budget is not None
        return is_bounded and not any(map(self._is_set, _FORMS))

    @property
    def kind(self) -> str:
        """Name of the kind that is set."""
        return next(name for name in _FORMS if self._is_set(name))

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
            raise RequestError(cause, _FORMS[name], param=PARAM)
        if name != "json_object":
            require_unicode(f"structured_outputs {name}", value, PARAM)


_FORMS = {
    "json_schema": "give the schema as a dict or as non-empty JSON text",
    "json_object": "use True or leave it out",
    "regex": "use a non-empty string",
    "grammar": "use a non-empty string",
    "choice": "list at least one text, none empty",
    "structural_tag": "give the tag as a dict or as non-empty JSON text",
}


def _json_text(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value))
    except RecursionError as error:
        cause = f"structured_outputs {name} nests too deeply"
        raise RequestError(cause, "flatten it", param=PARAM) from error
    except (TypeError, ValueError) as error:
        cause = f"structured_outputs {name} is not JSON ({shown(error)})"
        raise RequestError(cause, _FORMS[name], param=PARAM) from error


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""

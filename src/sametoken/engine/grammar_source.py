"""What structured outputs are compiled from: one text of one kind, of bounded size."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sametoken.core.structured_outputs import StructuredOutputs
from sametoken.errors import RequestError

#: Longer texts are refused, and those with deeper brackets: the compiler recurses on them.
MAX_CHARACTERS = 2**16
MAX_NESTING = 200

_ANY_OBJECT = '{"type": "object"}'
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A text to compile.

    Attributes:
        kind: which field of ``StructuredOutputs`` it came from.
        text: a JSON schema, a regular expression, or a grammar in GBNF form.
    """

    kind: str
    text: str

    @classmethod
    def of(cls, structured: StructuredOutputs) -> GrammarSource:
        """The text of a structure; a choice is a grammar of quoted texts.

        Raises:
            RequestError: it is too long, or nests too deeply.
        """
        kind = structured.kind
        texts = (_ANY_OBJECT,) if structured.json_object else getattr(structured, kind)
        texts = (texts,) if isinstance(texts, str) else texts
        # Before anything is made of them.
        _require_short(kind, sum(map(len, texts)))
        text = _one_of(texts) if kind == "choice" else texts[0]
        _require_short(kind, len(text))
        _require_shallow(kind, text)
        return cls(kind, text)


def _one_of(texts: tuple[str, ...]) -> str:
    quoted = (json.dumps(text, ensure_ascii=False) for text in texts)
    return f"root ::= {' | '.join(quoted)}"


def _require_short(kind: str, num_characters: int) -> None:
    if num_characters > MAX_CHARACTERS:
        raise RequestError(
            f"structured_outputs {kind} has {num_characters} characters, above {MAX_CHARACTERS}",
            "make it smaller",
        )


def _require_shallow(kind: str, text: str) -> None:
    depth = deepest = 0
    for character in text:
        depth = max(0, depth + _BRACKETS.get(character, 0))
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise RequestError(
            f"structured_outputs {kind} nests brackets deeper than {MAX_NESTING}", "flatten it"
        )

"""Tool calls in the XML form of Qwen3-Coder and Qwen3.5, read as they grow.

::

    <function=NAME>
    <parameter=NAME>
    VALUE
    </parameter>
    </function>

A value has no quotes and no escapes: only the function's JSON Schema tells a text from a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any

#: The JSON Schema of each function's parameters, by the function's name.
Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_PARAMETER_END = "</parameter>"
_FUNCTION_END = re.compile(r"\s*</function>")
#: The templates write scalars of earlier calls as Python does.
_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    NoneType: frozenset({"null"}),
}


def read_call(body: str, is_whole: bool, schemas: Schemas) -> tuple[str, str] | None:
    """The function's name, and its arguments so far as JSON text; None until the name is there.

    Texts grow with the body. Other values come whole, since only then it is known what they are.

    Args:
        body: what stands between the marks of a call, or its beginning.
        is_whole: whether the closing mark has come.
        schemas: of all functions.
    """
    head = _FUNCTION.match(body)
    if head is None:
        return None
    properties = schemas.get(head[1], {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    members = []
    place = head.end()
    while opening := _PARAMETER.match(body, place):
        start, end = opening.end(), body.find(_PARAMETER_END, opening.end())
        is_open = end < 0 and not is_whole
        shown = num_safe(body, _PARAMETER_END) if is_open else len(body) if end < 0 else end
        text = body[start:shown].removesuffix("\n")
        value = _value(text, properties.get(opening[1], {"type": "string"}), is_open=is_open)
        if value is not None:
            members.append(f"{json.dumps(opening[1], ensure_ascii=False)}: {value}")
        if end < 0:
            return head[1], _object(members, is_closed=is_whole)
        place = end + len(_PARAMETER_END)
    is_closed = is_whole or _FUNCTION_END.match(body, place) is not None
    return head[1], _object(members, is_closed=is_closed)


def num_safe(text: str, mark: str) -> int:
    """Leading characters that a mark begun at the text's end cannot take back."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return len(text) - size
    return len(text)


def _object(members: list[str], *, is_closed: bool) -> str:
    return "{" + ", ".join(members) + ("}" if is_closed else "")


def _value(text: str, schema: Any, *, is_open: bool) -> str | None:
    """A value as JSON, or the beginning of one; None while that cannot be told."""
    named = schema.get("type") if isinstance(schema, dict) else None
    if named == "string":
        quoted = json.dumps(text, ensure_ascii=False)
        return quoted[:-1] if is_open else quoted
    return None if is_open else _as_json(text, named)


def _as_json(text: str, named: Any) -> str:
    """The text if it is JSON of a type that the schema allows, else a JSON string of it."""
    word = _WORDS.get(text.strip(), text.strip())
    try:
        kinds = _KINDS[type(json.loads(word, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        kinds = frozenset()
    allowed = not isinstance(named, list) or any(kind in named for kind in kinds)
    return word if kinds and allowed else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)

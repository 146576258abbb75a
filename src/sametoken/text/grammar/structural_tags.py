"""Structural tags: texts in which marks say where a schema, an expression or a grammar holds.

The format is xgrammar's (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html), as vLLM
takes it, without what is over token ids: special tokens have no text in a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sametoken.errors import RequestError, shown

#: The keys of every format.
_KEYS = {
    "const_string": ("value",),
    "any_text": ("excludes",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "sequence": ("elements",),
    "or": ("elements",),
    **dict.fromkeys(("optional", "star", "plus"), ("content",)),
    "repeat": ("min", "max", "content"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
#: Formats whose one key is what ``StructuredOutputs`` has a kind for.
_OWN = ("json_schema", "regex", "grammar")
#: A whole tag: the form of today, and the one before it, which named its tags alone.
_WHOLE, _FORMER = ("type", "format"), ("type", "structures", "triggers")

#: Takes the kind and the text of a constraint within a tag.
Visit = Callable[[str, str], str]


def with_grammars(text: str, grammar_of: Visit) -> str:
    """A tag, as JSON, whose schemas, regular expressions and grammars are ``grammar_of`` them.

    These are in GBNF form.

    Raises:
        RequestError: it is no structural tag, or has a format or a key that is not supported.
    """
    whole = _parsed(text)
    if "structures" in whole:
        whole = _of_former(whole)
    _require_keys(whole, "structural_tag", _WHOLE)
    found = _visited(whole.get("format"), grammar_of)
    return json.dumps({"type": "structural_tag", "format": found})


def _parsed(text: str) -> dict[str, Any]:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structural_tag is not JSON: {error}", "give a JSON object") from error
    if not isinstance(whole, dict) or whole.get("type", "structural_tag") != "structural_tag":
        cause = f"structural_tag {shown(whole)} is none"
        raise RequestError(cause, 'use {"type": "structural_tag", "format": {...}}')
    return whole


def _of_former(whole: dict[str, Any]) -> dict[str, Any]:
    """The same in the form of today."""
    _require_keys(whole, "structural_tag", _FORMER)
    tags = []
    for one in _list_of(whole, "structures"):
        _require_keys(one, "a structure", ("begin", "schema", "end"))
        content = {"type": "json_schema", "json_schema": one.get("schema")}
        tags.append({"begin": one.get("begin"), "content": content, "end": one.get("end")})
    triggered = {"type": "triggered_tags", "triggers": whole.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": triggered}


def _visited(given: Any, grammar_of: Visit) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        cause = f"structural_tag has no format {shown(given if kind is None else kind)}"
        raise RequestError(cause, f"use an object with a type of {', '.join(_KEYS)}")
    found = dict(given)
    if kind == "json_schema" and found.get("style") == "json":
        del found["style"]
    _require_keys(found, f"the format {kind}", ("type", *_KEYS[kind]))
    if kind in _OWN:
        (key,) = _KEYS[kind]
        value = found.get(key)
        own = json.dumps(value) if kind == "json_schema" else value
        if not isinstance(own, str) or not own:
            raise RequestError(f"the format {kind} lacks {key!r}", "add it, not empty")
        return {"type": "grammar", "grammar": grammar_of(kind, own)}
    if kind == "tag" and not (isinstance(found.get("begin"), str) and _is_text(found.get("end"))):
        cause = f"the marks of {shown(given)} are no texts"
        raise RequestError(cause, "use a text for begin, and a text or a list of texts for end")
    if "content" in _KEYS[kind]:
        found["content"] = _visited(found.get("content"), grammar_of)
    for key in {"elements", "tags"}.intersection(_KEYS[kind]):
        implied = {"type": "tag"} if key == "tags" else {}
        parts = _list_of(found, key)
        found[key] = [
            _visited(implied | one if isinstance(one, dict) else one, grammar_of) for one in parts
        ]
    return found


def _list_of(given: dict[str, Any], key: str) -> list[Any]:
    value = given.get(key)
    if not isinstance(value, list) or not value:
        raise RequestError(f"{key!r} of a structural_tag is {shown(value)}", "list at least one")
    return value


def _is_text(value: Any) -> bool:
    texts = value if isinstance(value, list) and value else [value]
    return all(isinstance(text, str) for text in texts)


def _require_keys(given: Any, name: str, keys: tuple[str, ...]) -> None:
    """Refuse other keys, which the compiler would ignore."""
    if not isinstance(given, dict):
        raise RequestError(f"{name} is {shown(given)}", "use an object")
    for key in given:
        if key not in keys:
            raise RequestError(f"{name} has no key {shown(key)}", f"use {', '.join(keys)}")

"""The types that a JSON Schema allows, as far as they tell texts from other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

_KINDS: Mapping[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    NoneType: frozenset({"null"}),
}
STRING = _KINDS[str]
_ANY = frozenset[str]().union(*_KINDS.values())


def types_of_value(value: Any) -> frozenset[str]:
    """JSON Schema's types of a value as ``json`` reads it."""
    return _KINDS[type(value)]


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types of a function's parameter; text for one that the schema does not have."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or name not in properties:
        return STRING
    return frozenset(_types(properties[name], schema))


def _types(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """The types of a schema and of those that it leads to, by however long a way."""
    left, followed = [schema], set[str]()
    while left:
        found = left.pop()
        fields = found if isinstance(found, dict) else {}
        named, reference = fields.get("type"), fields.get("$ref")
        # Pydantic has written a reference beside a default as the only one of allOf.
        choices = next((fields[key] for key in ("anyOf", "oneOf", "allOf") if key in fields), None)
        if isinstance(named, str):
            yield named
        elif isinstance(named, list):
            yield from (one for one in named if isinstance(one, str))
        elif "const" in fields:
            yield from types_of_value(fields["const"])
        elif isinstance(fields.get("enum"), list):
            for value in fields["enum"]:
                yield from types_of_value(value)
        elif isinstance(choices, list):
            left += choices
        elif not isinstance(reference, str):
            yield from _ANY
        elif reference not in followed:
            followed.add(reference)
            left.append(_referenced(root, reference))


def _referenced(root: Any, reference: str) -> Any:
    """What a reference within the schema names; None if there is nothing."""
    found = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found

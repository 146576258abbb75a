"""JSON Schemas as the grammar compiler honours them; what it would ignore is refused by name.

Keywords follow JSON Schema draft 2020-12. Annotations are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from sametoken.errors import RequestError

MAX_DEPTH = 64

_IGNORED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    )
)
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "discriminator"),
    )
)
# Each decides alone: what stands beside it would be ignored.
_ALONE = ("$ref", "allOf", "anyOf", "oneOf")
_BY_TYPE = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
    "multipleOf": ("integer",),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "minProperties": ("object",),
    "maxProperties": ("object",),
}
_FORMS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), dict),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "required", "enum"), list),
    **dict.fromkeys(("pattern", "format", "$ref"), str),
    "type": (str, list),
}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    *("items", "additionalProperties", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)


def check_schema(text: str) -> tuple[str, ...]:
    """Refuse a schema that is no schema, or that asks for what would not be kept.

    Returns:
        The regular expressions in it.

    Raises:
        RequestError: naming the keyword and what to use instead.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {error}", "give a JSON object") from error
    if not isinstance(root, dict):
        raise RequestError("json_schema is not a JSON object", 'give a schema: {"type": ...}')
    patterns: list[str] = []
    for schema in list(_schemas(root, 0)):
        _check(schema, root)
        patterns += schema.get("patternProperties", {})
        patterns += [schema["pattern"]] if "pattern" in schema else []
    return tuple(patterns)


def _schemas(schema: Any, depth: int) -> Iterator[dict[str, Any]]:
    """A schema and all within it."""
    if depth > MAX_DEPTH:
        raise RequestError(f"json_schema is nested deeper than {MAX_DEPTH}", "flatten it")
    if isinstance(schema, dict):
        _check_form(schema)
        yield schema
        for child in _children(schema):
            yield from _schemas(child, depth + 1)


def _check(schema: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    for key in schema:
        if key in _IGNORED and schema[key] is not False:
            raise _refused(key, "is not supported", "leave it out")
    _check_alone(schema)
    _check_types(schema)
    unknown = [name for name in schema.get("required", ()) if name not in _properties(schema)]
    if unknown:
        raise _refused("required", f"names {unknown[0]!r}, no property", "add it to properties")
    if "oneOf" in schema and not _disjoint(schema["oneOf"], root):
        raise _refused("oneOf", "has branches that may overlap", "use anyOf")


def _check_form(schema: Mapping[str, Any]) -> None:
    for key, form in _FORMS.items():
        if key in schema and not isinstance(schema[key], form):
            raise _refused(key, f"is {schema[key]!r}", "see JSON Schema for its form")
    for key in ("type", "required"):
        if not all(isinstance(name, str) for name in schema.get(key, ())):
            raise _refused(key, f"is {schema[key]!r}", "list names")


def _check_alone(schema: Mapping[str, Any]) -> None:
    for key in _ALONE:
        if key not in schema:
            continue
        others = sorted(schema.keys() - _ANNOTATIONS - {key})
        if others:
            raise _refused(
                key, f"stands beside {', '.join(others)}", f"move them into the schema under {key}"
            )
    if len(schema.get("allOf", ())) > 1:
        raise _refused("allOf", "has several schemas", "merge them into one")
    ref = schema.get("$ref")
    if ref is not None and ref != "#" and not ref.startswith("#/"):
        raise _refused("$ref", f"leads to {ref!r}, outside the schema", "use #/$defs/...")


def _check_types(schema: Mapping[str, Any]) -> None:
    for key, types in _BY_TYPE.items():
        if key in schema and schema.get("type") not in types:
            raise _refused(
                key, f"needs the type to be {' or '.join(types)}", "state the type, and one alone"
            )
    shape = [key for key in ("pattern", "format") if key in schema]
    length = [key for key in ("minLength", "maxLength") if key in schema]
    if shape and length:
        raise _refused(length[0], f"stands beside {shape[0]}", "state the length in a pattern")


def _children(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in _MAPS:
        yield from schema.get(key, {}).values()
    for key in _LISTS:
        yield from schema.get(key, ())
    for key in _SINGLE:
        yield schema.get(key)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schema.get("properties", {})
    return found


def _disjoint(branches: list[Any], root: Mapping[str, Any]) -> bool:
    """Whether no value can satisfy two branches, as far as types and constants tell."""
    resolved = [_resolve(branch, root) for branch in branches]
    return all(_apart(one, other) for one, other in combinations(resolved, 2))


def _apart(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    types, other_types = _types(one), _types(other)
    if types and other_types and not types & other_types:
        return True
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None and not values & other_values:
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    return types == other_types == {"object"} and any(
        _apart(_properties(one).get(name), _properties(other).get(name)) for name in sorted(shared)
    )


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Type names, integers being numbers; empty if the schema does not say."""
    found = schema.get("type", [])
    names = [found] if isinstance(found, str) else found
    return {"number" if name == "integer" else name for name in names}


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema lists, as JSON text."""
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if isinstance(schema.get("enum"), list):
        return {json.dumps(value, sort_keys=True) for value in schema["enum"]}
    return None


def _resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a local reference leads to, one step; None if it leads nowhere."""
    ref = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(ref, str):
        return schema
    found: Any = root
    for part in ref.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, dict):
        _check_form(found)
    return found


def _refused(key: str, cause: str, remedy: str) -> RequestError:
    return RequestError(f"json_schema: {key} {cause}", remedy)

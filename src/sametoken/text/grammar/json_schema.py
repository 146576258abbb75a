"""Checks of JSON Schemas: keywords that the grammar compiler would ignore are refused by name.

Keywords follow JSON Schema draft 2020-12. Annotations are accepted.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from sametoken.errors import RequestError, shown
from sametoken.text.grammar.one_of import disjoint, listed_values
from sametoken.text.grammar.property_names import admits, find_clash
from sametoken.text.grammar.regular_expressions import plain_regex

MAX_DEPTH = 64
#: Characters of a property's name. Beside names that are not given, the compiler recurses on each
#: byte of one: from 12,000 on it has ended its process.
MAX_NAME = 1024

# The compiler keeps whole numbers in 64 bits, and ignores a larger ``multipleOf``.
_LARGEST, _LARGEST_MULTIPLE = 2**63 - 1, 1024

_UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    )
)
# The compiler ignores all other keywords of a schema that has one of these.
_EXCLUSIVE = ("$ref", "allOf", "anyOf", "oneOf")
#: Steps of 1 in which the compiler writes numbers between two bounds.
_STEPS = 10**6
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBERS = frozenset(("integer", "number"))
_BY_TYPE = {
    **dict.fromkeys(_RANGE, ("integer", "number")),
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
#: What holds values, in which nothing is a reference.
_DATA = ("const", "enum", "default", "example", "examples")
_NEVER_EMPTY = ("anyOf", "oneOf", "allOf", "enum", "type")
#: What counts count, what lists it, and what allows more than that. Beside a count the compiler
#: forbids what is not allowed in words, where JSON Schema allows it.
_COUNTED = (
    ("Items", "prefixItems", ("items", "unevaluatedItems")),
    (
        *("Properties", "properties"),
        ("additionalProperties", "unevaluatedProperties", "patternProperties"),
    ),
)
_IN_RANGE = "use a number of 64 bits"
_POINTER = "(/([^/~]|~[01])*)*"
#: Formats in which the compiler allows characters that JSON escapes, and what they mean.
_POINTERS = {"json-pointer": _POINTER, "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})"}
_SINGLE = (
    *("items", "additionalProperties", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
#: What allows other properties than those that are named.
_OTHERS = ("additionalProperties", "unevaluatedProperties")
#: What restricts a value, and is ignored where all values are listed.
_RESTRICTING = (
    *_BY_TYPE,
    *("properties", "patternProperties", "prefixItems", "required"),
    *_SINGLE,
)


#: What means something beside others. All else only annotates, as do keywords of other tools.
_MEANINGFUL = frozenset((*_RESTRICTING, *_EXCLUSIVE, "type", "enum", "const", "format"))


def check_schema(text: str) -> tuple[str, ...]:
    """Refuse an invalid schema, and one with unsupported keywords.

    Returns:
        The regular expressions in it.

    Raises:
        RequestError: names the keyword and what to use instead.
    """
    root = _parsed(text)
    if not isinstance(root, dict):
        raise RequestError("json_schema is not a JSON object", 'give a schema: {"type": ...}')
    patterns: list[str] = []
    schemas = _schemas(root)
    of_names = {id(schema.get("propertyNames")) for schema in schemas}
    for schema in schemas:
        # Names are strings, whether their schema says so or not.
        _check(schema, root, "string" if id(schema) in of_names else ())
        patterns += schema.get("patternProperties", {})
        patterns += [schema["pattern"]] if "pattern" in schema else []
    return tuple(patterns)


def compilable(text: str) -> str:
    """A checked schema as the compiler reads it right.

    Its patterns are plain: beyond ASCII the compiler would not escape what they match. ``format``
    is left out beside a pattern: there it only annotates the value (draft 2020-12, section 7), but
    the compiler would ignore the pattern. zod writes both. ``oneOf``, whose branches have been
    compared, is ``anyOf``: the compiler would warn where it cannot tell that they are disjoint.
    Patterns of names that ask what all names but the properties' are asked are left out: beside
    them the compiler would allow a property what the others may have. ``propertyNames``, which
    admits all properties, is left out beside them: with it the compiler counts them wrong.
    """
    root, is_whole = _parsed(text), True
    for schema in _schemas(root):
        given = dict(schema)
        if schema.get("format") in _POINTERS and "string" in schema.get("type", ()):
            schema.setdefault("pattern", _POINTERS[schema["format"]])
        if "pattern" in schema:
            schema.pop("format", None)
            schema["pattern"] = plain_regex(schema["pattern"], in_schema=True)
        if schema.get("properties") and any(schema.get(key, False) is not False for key in _OTHERS):
            schema.pop("patternProperties", None)
        if "patternProperties" in schema:
            found = schema["patternProperties"].items()
            schema["patternProperties"] = {
                plain_regex(name, in_schema=True): one for name, one in found
            }
        names = schema.get("propertyNames")
        if isinstance(names, dict) and not names.keys() & _MEANINGFUL:
            # The compiler would let them be any JSON.
            schema["propertyNames"] = {**names, "type": "string"}
        if schema.get("properties"):
            schema.pop("propertyNames", None)
        if "oneOf" in schema:
            schema["anyOf"] = schema.pop("oneOf")
        is_whole = is_whole and schema == given
    return text if is_whole else json.dumps(root)


def moved(schema: Any, place: str) -> Any:
    """A schema, or a list of schemas, whose references hold within another one at ``place``."""
    if isinstance(schema, list):
        return [moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = place + value.removeprefix("#")
        elif key in _MAPS and isinstance(value, dict):
            found[key] = {name: moved(one, place) for name, one in value.items()}
        elif key not in _DATA:
            found[key] = moved(value, place)
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(
            text,
            object_pairs_hook=_parse_object,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_parse_float,
        )
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {error}", "give a JSON object") from error


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without duplicate keys, whose meaning depends on the parser."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise RequestError(f"json_schema has {shown(twice)} twice in an object", "name it once")
    return found


def _parse_int(digits: str) -> int:
    # Converting thousands of digits takes long.
    if len(digits) > len(str(-_LARGEST)) or abs(int(digits)) > _LARGEST:
        raise RequestError(f"json_schema holds the number {shown(digits)}", _IN_RANGE)
    return int(digits)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"json_schema holds the number {shown(text)}", _IN_RANGE)
    return value


def _schemas(root: Any) -> list[dict[str, Any]]:
    """A schema, and each one that is nested in it or that a reference leads to."""
    found = list(_subschemas(root, 0))
    known = set(map(id, found))
    for schema in found:
        target = _resolve(schema, root)
        if id(target) not in known:
            more = [one for one in _subschemas(target, 0) if id(one) not in known]
            known.update(map(id, more))
            # They are looked at in their turn.
            found += more
    return found


def _subschemas(schema: Any, depth: int) -> Iterator[dict[str, Any]]:
    """A schema and all schemas nested in it."""
    if depth > MAX_DEPTH:
        raise RequestError(f"json_schema is nested deeper than {MAX_DEPTH}", "flatten it")
    if isinstance(schema, dict):
        _check_form(schema)
        yield schema
        for child in _children(schema):
            yield from _subschemas(child, depth + 1)


def _check(
    schema: Mapping[str, Any], root: Mapping[str, Any], implied: str | tuple[str, ...]
) -> None:
    for key in schema:
        if key in _UNSUPPORTED and schema[key] is not False:
            raise _refused(key, "is not supported", "leave it out")
    _check_exclusive(schema)
    _check_types(schema, schema.get("type", implied))
    _check_listed(schema)
    if "propertyNames" in schema:
        _check_names(schema, root)
    _check_counts(schema)
    properties = schema.get("properties", {})
    long = next((name for name in properties if len(name) > MAX_NAME), None)
    if long is not None:
        raise _refused(
            "properties",
            f"has the name {shown(long)} of {len(long)} characters, above {MAX_NAME}",
            "shorten it",
        )
    unknown = [name for name in schema.get("required", ()) if name not in properties]
    if unknown:
        raise _refused(
            "required", f"names {shown(unknown[0])}, no property", "add it to properties"
        )
    clash = find_clash(schema, _OTHERS, _MEANINGFUL)
    if clash is not None:
        raise _refused(
            "patternProperties",
            f"has {shown(clash.pattern)}, which may apply where {shown(clash.other)} does",
            "give both the same schema, or let the pattern begin with other characters than the "
            "name, behind ^; additionalProperties can be left out",
        )
    if not disjoint([_resolve(branch, root) for branch in schema.get("oneOf", ())]):
        raise _refused("oneOf", "has branches that may overlap", "use anyOf")


def _check_form(schema: Mapping[str, Any]) -> None:
    for key, form in _FORMS.items():
        if key in schema and not isinstance(schema[key], form):
            raise _refused(key, f"is {shown(schema[key])}", "see JSON Schema for its form")
    for key in _NEVER_EMPTY:
        if schema.get(key) == []:
            raise _refused(key, "is empty", "list what is allowed, or leave it out")
    for key in ("type", "required"):
        if not all(isinstance(name, str) for name in schema.get(key, ())):
            raise _refused(key, f"is {shown(schema[key])}", "list names")


def _check_exclusive(schema: Mapping[str, Any]) -> None:
    for key in _EXCLUSIVE:
        if key not in schema:
            continue
        others = sorted(schema.keys() & _MEANINGFUL - {key})
        if others:
            raise _refused(
                key,
                f"excludes {textwrap.shorten(', '.join(others), 60)}",
                f"move them into the schema under {key}",
            )
    if len(schema.get("allOf", ())) > 1:
        raise _refused("allOf", "has several schemas", "merge them into one")
    ref = schema.get("$ref")
    if ref is not None and ref != "#" and not ref.startswith("#/"):
        raise _refused("$ref", f"refers to {shown(ref)}, outside the schema", "use #/$defs/...")


def _check_types(schema: Mapping[str, Any], stated: str | Iterable[str]) -> None:
    names = {stated} if isinstance(stated, str) else set(stated)
    for key, types in _BY_TYPE.items():
        # It is of those named that it restricts; whole numbers are numbers.
        bound = names & (_NUMBERS if _NUMBERS.issuperset(types) else set(types))
        if key in schema and (not bound or not bound.issubset(types)):
            raise _refused(key, f"needs the type to be {' or '.join(types)}", "state that type")
    shape = [key for key in ("pattern", "format") if key in schema]
    length = [key for key in ("minLength", "maxLength") if key in schema]
    if shape and length:
        raise _refused(length[0], f"excludes {shape[0]}", "state the length in a pattern")
    multiple = schema.get("multipleOf", 1)
    if multiple not in range(1, _LARGEST_MULTIPLE + 1):
        remedy = f"use a whole number from 1 to {_LARGEST_MULTIPLE}"
        raise _refused("multipleOf", f"is {shown(multiple)}", remedy)
    if "multipleOf" in schema and any(key in schema for key in _RANGE):
        raise _refused("multipleOf", "excludes a minimum or a maximum", "list the values")
    if "number" in names and _is_empty(schema):
        raise _refused(
            "maximum", "leaves no number of 6 decimals above the minimum", "list the values"
        )


def _is_empty(schema: Mapping[str, Any]) -> bool:
    """Whether the compiler finds no number in a range, for which it would write nothing at all."""
    if not all(type(schema[key]) in (int, float) for key in _RANGE if key in schema):
        return False
    scaled = {key: Fraction(str(schema[key])) * _STEPS for key in _RANGE if key in schema}
    least = {"minimum": math.ceil, "exclusiveMinimum": lambda bound: math.floor(bound) + 1}
    most = {"maximum": math.floor, "exclusiveMaximum": lambda bound: math.ceil(bound) - 1}
    lower = [rounded(scaled[key]) for key, rounded in least.items() if key in scaled]
    upper = [rounded(scaled[key]) for key, rounded in most.items() if key in scaled]
    return bool(lower and upper) and max(lower) > min(upper)


def _check_names(schema: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    """Refuse ``propertyNames`` where the compiler would let it replace what else restricts.

    It would also ignore it beside properties, and write names that are no strings.
    """
    if "patternProperties" in schema:
        raise _refused("propertyNames", "excludes patternProperties", "state the names in one")
    key = next((key for key in _OTHERS if key in schema), None)
    if key is not None and bool(schema.get("properties")) == (schema[key] is not False):
        raise _refused("propertyNames", f"excludes this {key}", f"leave {key} out")
    if not _are_strings(schema["propertyNames"], root):
        raise _refused("propertyNames", "may be no strings", "let it list or describe strings")
    names = _resolve(schema["propertyNames"], root)
    for name in schema.get("properties", ()):
        if not admits(names, name, _MEANINGFUL):
            raise _refused(
                "propertyNames", f"may exclude the property {shown(name)}", "leave one of them out"
            )


def _are_strings(names: Any, root: Mapping[str, Any]) -> bool:
    """Whether all that the compiler makes of a schema of names are strings."""
    if not isinstance(names, dict):
        return True
    pending, known = [names], set[int]()
    for one in pending:
        branches = [branch for key in ("anyOf", "oneOf", "allOf") for branch in one.get(key, ())]
        branches += [_resolve(one, root)] if "$ref" in one else []
        if not all(isinstance(branch, dict) for branch in branches):
            return False
        values = listed_values(one)
        # Without more it is of strings where it is that of the names itself.
        is_text = one.get("type") == "string" or one is names or bool(branches)
        if not (is_text if values is None else all(text[0] == '"' for text in values)):
            return False
        pending += [branch for branch in branches if id(branch) not in known]
        known.update(map(id, branches))
    return True


def _check_listed(schema: Mapping[str, Any]) -> None:
    """Refuse what would restrict the values that ``enum`` or ``const`` lists."""
    values, stated = listed_values(schema), schema.get("type", ())
    if values is None:
        return
    types = {stated} if isinstance(stated, str) else set(stated)
    key = "const" if "const" in schema else "enum"
    others = [name for name in _RESTRICTING if name in schema]
    if others:
        raise _refused(key, f"excludes {others[0]}", "list only the values that are meant")
    if key == "const" and not values <= (listed_values({"enum": schema.get("enum")}) or values):
        raise _refused("const", "is not in enum", "keep the one that is meant")
    wrong = [text for text in sorted(values) if types and not types & _types_of(json.loads(text))]
    if wrong:
        raise _refused(key, f"holds {shown(wrong[0])}, not of its type", "correct one of them")


def _types_of(value: Any) -> set[str]:
    """The names of a value's types; a whole number has two."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"number", "integer"} if value == int(value) else {"number"}
    by_class = {bool: "boolean", str: "string", list: "array"}
    return {by_class.get(type(value), "null" if value is None else "object")}


def _check_counts(schema: Mapping[str, Any]) -> None:
    for noun, listed, opened in _COUNTED:
        least, num_listed = schema.get(f"min{noun}", 0), len(schema.get(listed, ()))
        too_many = isinstance(least, int) and least > num_listed
        key = f"min{noun}" if too_many else f"max{noun}"
        closed = not any(one in schema for one in opened)
        if closed and (too_many or (key in schema and not num_listed)):
            raise _refused(key, f"needs {opened[0]}", f"state them; {opened[0]}: {{}} allows any")


def _children(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in _MAPS:
        yield from schema.get(key, {}).values()
    for key in _LISTS:
        yield from schema.get(key, ())
    for key in _SINGLE:
        yield schema.get(key)


def _resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """The target of a local reference, resolved once; None if there is none."""
    ref = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(ref, str):
        return schema
    found: Any = root
    for part in ref.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _refused(key: str, cause: str, remedy: str) -> RequestError:
    return RequestError(f"json_schema: {key} {cause}", remedy)

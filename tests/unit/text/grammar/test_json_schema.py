"""Schemas: what the compiler would ignore is refused by name; the rest passes."""

from __future__ import annotations

import json

import pytest

from sametoken.errors import RequestError
from sametoken.text.grammar.json_schema import MAX_DEPTH, check_schema, compilable

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
OF_NO_FORM = {"type": "object", "properties": {"a": {"type": 5}}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": ["integer", "null"]},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 9},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-6},
        {"type": "number", "minimum": -1e300, "exclusiveMaximum": -1e299},
        {"type": "integer", "multipleOf": 3},
        {"type": ["integer", "null"], "minimum": 1},
        {"type": ["number", "string", "null"], "maximum": 1.5, "minLength": 2},
        {"type": ["integer", "null"], "multipleOf": 3},
        {"type": "integer", "multipleOf": 3.0},
        {"type": "integer", "multipleOf": 1024},
        {"propertyNames": {"minLength": 1, "maxLength": 5}},
        {"propertyNames": {"minLength": 1}, "properties": {"a": INTEGER}},
        {"propertyNames": {"enum": ["b", "é"], "title": "T"}, "properties": {"é": {}}},
        {"propertyNames": {"$ref": "#/x"}, "properties": {"a": {}}, "x": {"type": "string"}},
        {"propertyNames": {"anyOf": [{"const": "a"}, {"type": "string", "maxLength": 2}]}},
        {"propertyNames": {}, "properties": {"a": {}}, "additionalProperties": False},
        {"propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": ["a"]}}},
        {"type": "string", "minLength": 1, "maxLength": 4},
        {"type": "array", "prefixItems": [INTEGER], "items": False, "uniqueItems": False},
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
        {"type": "array", "items": {}, "minItems": 2},
        {"type": "array", "prefixItems": [INTEGER], "minItems": 1},
        {"type": "object", "additionalProperties": True, "minProperties": 1},
        {"type": "object", "properties": {"a": INTEGER}, "minProperties": 1, "maxProperties": 3},
        {"type": "object", "properties": {"not": INTEGER, "if": INTEGER}, "required": ["not"]},
        {"anyOf": [INTEGER, {"type": "string"}], "title": "T", "description": "D"},
        {"allOf": [INTEGER]},
        {"$ref": "#/$defs/x", "$defs": {"x": INTEGER}},
        {"$ref": "#/$defs/x", "$defs": {"x": INTEGER}, "example": 3, "x-order": 1},
        {"anyOf": [INTEGER, {"type": "null"}], "nullable": True, "default": None},
        {"oneOf": [INTEGER, {"type": "string"}]},
        {"oneOf": [{"const": 1}, {"enum": [2, 3]}]},
        {"oneOf": [CAT, DOG]},
        {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
        {"enum": [{"not": 1}], "default": {"minimum": 3}},
        {"type": ["string", "null"], "enum": ["a", None], "format": "byte"},
        {"type": "number", "enum": [1, 2.5], "nullable": True},
        {"type": "string", "const": "a", "enum": ["a"]},
    ],
)
def test_what_is_honoured_passes(schema):
    assert check_schema(json.dumps(schema)) == ()


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ({"not": INTEGER}, "not is not supported"),
        ({"if": INTEGER, "then": INTEGER}, "if is not supported"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems is not"),
        ({"type": "array", "contains": INTEGER}, "contains is not supported"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired is not"),
        ({"minimum": 3}, "minimum needs the type to be integer or number"),
        ({"type": ["boolean", "string"], "minimum": 3}, "minimum needs the type"),
        ({"type": ["integer", "number"], "multipleOf": 3}, "multipleOf needs the type"),
        ({"propertyNames": {"minimum": 3}}, "minimum needs the type"),
        ({"items": {"maxLength": 3}}, "maxLength needs the type to be string"),
        # The compiler would write nothing at all.
        ({"type": "number", "minimum": 1e-9, "maximum": 1e-7}, "no number of 6 decimals"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "no number of 6"),
        ({"type": ["number", "null"], "minimum": 1, "exclusiveMaximum": 1}, "no number of 6"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf needs the type to be integer"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "multipleOf excludes a minimum"),
        ({"pattern": "a"}, "pattern needs the type to be string"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "minLength excludes pattern"),
        ({"type": "string", "format": "date", "maxLength": 2}, "maxLength excludes format"),
        ({"type": "integer", "enum": [1, 2], "minimum": 2}, "enum excludes minimum"),
        ({"type": "string", "const": "a", "pattern": "b"}, "const excludes pattern"),
        ({"enum": [{"a": 1}], "properties": {"a": INTEGER}}, "enum excludes properties"),
        ({"type": "string", "enum": ["a", 1]}, "enum holds '1', not of its type"),
        ({"type": "integer", "enum": [1, 2.0, 2.5]}, "enum holds '2.5', not of its type"),
        ({"type": "integer", "const": "a"}, "const holds '\"a\"', not of its type"),
        ({"const": 1, "enum": [2]}, "const is not in enum"),
        (
            {"propertyNames": {"const": "a"}, "patternProperties": {"b": {}}},
            "propertyNames excludes patternProperties",
        ),
        (
            {"propertyNames": {"const": "a"}, "properties": {"a": {}}, "additionalProperties": {}},
            "propertyNames excludes this additionalProperties",
        ),
        # The compiler would take these properties all the same, and write null: as a name.
        ({"propertyNames": {"enum": ["b"]}, "properties": {"a": {}}}, "exclude the property 'a'"),
        ({"propertyNames": {"maxLength": 1}, "properties": {"ab": {}}}, "the property 'ab'"),
        ({"propertyNames": {"minLength": "x"}, "properties": {"a": {}}}, "the property 'a'"),
        ({"propertyNames": {"type": "null"}, "properties": {"a": {}}}, "the property 'a'"),
        ({"propertyNames": {"anyOf": [{"const": "a"}]}, "properties": {"a": {}}}, "may exclude"),
        ({"propertyNames": False, "properties": {"a": {}}}, "may exclude"),
        ({"propertyNames": {"enum": ["a", None]}}, "propertyNames may be no strings"),
        ({"propertyNames": {"$ref": "#/x"}, "x": {}}, "propertyNames may be no strings"),
        ({"propertyNames": {"oneOf": [{"const": "a"}, {"const": 1}]}}, "may be no strings"),
        (
            {"propertyNames": {"const": "a"}, "unevaluatedProperties": False},
            "propertyNames excludes this unevaluatedProperties",
        ),
        (
            {"properties": {"ab": TEXT}, "patternProperties": {"^a": INTEGER}},
            "patternProperties has '\\^a', which may apply where 'ab' does",
        ),
        ({"properties": {"ab": TEXT}, "patternProperties": {"b": INTEGER}}, "where 'ab' does"),
        ({"properties": {"ab": TEXT}, "patternProperties": {"a.*": {}}}, "where 'ab' does"),
        # A search would go back too often, or count too far.
        ({"properties": {"a" * 20 + "b": TEXT}, "patternProperties": {"^(a+)+$": INTEGER}}, "may"),
        ({"properties": {"a" * 20 + "b": TEXT}, "patternProperties": {"^(a|a)*$": INTEGER}}, "may"),
        ({"properties": {"a" * 49: TEXT}, "patternProperties": {"a*a*a*b": INTEGER}}, "may apply"),
        ({"properties": {"b": TEXT}, "patternProperties": {"a{4294967296}": INTEGER}}, "may apply"),
        ({"properties": {"ab": {}}, "patternProperties": {"a.*": TEXT}}, "where 'ab' does"),
        ({"patternProperties": {"a.*": TEXT, ".*b": INTEGER}}, r"where '\.\*b' does"),
        ({"patternProperties": {"^a+": TEXT, "^ab": INTEGER}}, r"where '\^ab' does"),
        ({"patternProperties": {"^a|c": TEXT, "^b": INTEGER}}, r"where '\^b' does"),
        (
            {
                "properties": {"b": {}},
                "patternProperties": {"^a": TEXT},
                "additionalProperties": INTEGER,
            },
            "where 'additionalProperties' does",
        ),
        ({"type": ["integer", "null"], "multipleOf": 2.5}, "multipleOf is 2.5"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf is 0"),
        ({"type": "integer", "multipleOf": -3}, "multipleOf is -3"),
        ({"type": "integer", "multipleOf": 1025}, "multipleOf is 1025"),
        ({"type": "integer", "multipleOf": "3"}, "multipleOf is '3'"),
        ({"type": "array", "minItems": 2}, "minItems needs items"),
        ({"type": "array", "maxItems": 2}, "maxItems needs items"),
        ({"type": "array", "prefixItems": [INTEGER], "minItems": 2}, "minItems needs items"),
        ({"type": "object", "minProperties": 1}, "minProperties needs additionalProperties"),
        ({"type": "object", "maxProperties": 1}, "maxProperties needs additionalProperties"),
        ({"$ref": "#/$defs/x", "type": "integer", "$defs": {"x": {}}}, "excludes type"),
        ({"$ref": "https://example.com/x"}, "outside the schema"),
        ({"type": "integer", "anyOf": [{}]}, "anyOf excludes type"),
        ({"allOf": [INTEGER, {}]}, "allOf has several"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf has branches that may overlap"),
        ({"oneOf": [CAT, {"type": "object"}]}, "oneOf has branches"),
        ({"oneOf": [{"$ref": "#/$defs/gone"}, INTEGER]}, "oneOf has branches"),
        ({"type": "object", "required": ["a"]}, "required names 'a'"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not is not supported"),
        ({"$defs": {"x": {"minimum": 1}}, "type": "null"}, "minimum needs"),
        ({"type": "array", "items": {"type": "array", "contains": {}}}, "contains"),
        # Where only references lead, however long the way.
        ({"$ref": "#/x/y", "x": {"y": {"not": {}}}}, "not is not supported"),
        ({"$ref": "#/x", "x": {"$ref": "#/y"}, "y": {"anyOf": [{"contains": {}}]}}, "contains"),
        ({"oneOf": [{"$ref": "#/x"}, {"$ref": "#/x"}], "x": OF_NO_FORM}, "type is 5"),
        ({"type": 3}, "type is 3"),
        ({"type": [3]}, r"type is \[3\]"),
        ({"properties": []}, "properties is"),
        ({"required": [["a"]]}, "required is"),
        ({"pattern": 3, "type": "string"}, "pattern is 3"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(schema, cause):
    with pytest.raises(RequestError, match=cause) as caught:
        check_schema(json.dumps(schema))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "is not JSON"),
        ("[1]", "not a JSON object"),
        ("true", "not a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1), "nested deeper"),
    ],
)
def test_what_is_no_schema_is_refused(text, cause):
    with pytest.raises(RequestError, match=cause):
        check_schema(text)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "properties": {"ab": TEXT | {"description": "A name."}, "id": INTEGER},
            "patternProperties": {"^a": TEXT, "^xy*": INTEGER},
            "additionalProperties": False,
        },
        # The compiler makes only "a" of it.
        {"properties": {"ab": TEXT}, "patternProperties": {"^a": True}},
        {"properties": {"date": TEXT}, "patternProperties": {r"^\d{4}-\d\d?-\d+$": INTEGER}},
        {"properties": {"type": TEXT}, "patternProperties": {"^(ab|(?:cd)?)_[a-z]*$": INTEGER}},
        {"patternProperties": {"a.*": TEXT}, "additionalProperties": INTEGER},
    ],
)
def test_a_pattern_of_names_may_apply_where_it_asks_the_same(schema):
    assert check_schema(json.dumps(schema)) == tuple(schema["patternProperties"])


def test_a_format_beside_a_pattern_is_an_annotation():
    name = {"type": "string", "format": "email"}
    schema = {"type": "object", "properties": {"a": name, "format": name | {"pattern": "x"}}}
    found = json.loads(compilable(json.dumps(schema)))
    assert found["properties"] == {"a": name, "format": {"type": "string", "pattern": "x"}}


def test_other_schemas_are_compiled_as_they_were_written():
    text = '{"type" : "number", "minimum": 1.50, "description": "pattern"}'
    assert compilable(text) == text


def test_regular_expressions_are_found_wherever_they_stand():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "x+"}}},
        "patternProperties": {"^y": {"$ref": "#/far"}},
        "far": {"type": "string", "pattern": "é"},
    }
    assert sorted(check_schema(json.dumps(schema))) == ["^y", "x+", "é"]
    assert json.loads(compilable(json.dumps(schema)))["far"]["pattern"] == r"\u{e9}"

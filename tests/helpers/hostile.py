"""Hypothesis strategies for what a hostile client writes: schemas, grammars, regexes, stops."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

#: Texts with whatever Unicode has, and JSON too: halves of characters, marks, nulls.
TEXT = st.text(max_size=20) | st.sampled_from(["\ud800", "\0", "e\u0301", "\u202e", "a" * 3000])
NUMBER = (
    st.integers(-3, 12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([2**31, 2**63, 2**64, 10**400, -(10**4000), 1e308, 5e-324])
)
_NAMES = st.sampled_from(["root", "a", "b", "a", "b", "a", "b", "missing"])
_COUNT = st.integers(0, 3) | st.sampled_from([100, 65_535, 100_000, 2**31, 2**64])


@st.composite
def _repeats(draw: Any) -> str:
    low = draw(_COUNT)
    high = draw(_COUNT)
    return draw(st.sampled_from(["*", "+", "?", f"{{{low}}}", f"{{{low},}}", f"{{{low},{high}}}"]))


_ATOMS = st.sampled_from(
    ['"a"', '"the "', '""', '"\\""', '"\\xff"', '"\\u0000"', "[a-z]", "[^\\n]", "[]", "[z-a]", "."]
)


def _grow_rule(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(" ".join),
        st.lists(inner, min_size=1, max_size=4).map(" | ".join),
        inner.map("({})".format),
        st.tuples(inner, _repeats()).map("".join),
    )


_RULES = st.recursive(_ATOMS | _NAMES, _grow_rule, max_leaves=12)


@st.composite
def grammars(draw: Any) -> str:
    """GBNF: mostly of its form, of rules that call each other, the ambiguous and the endless."""
    names = ["root", "a", "b", *draw(st.lists(_NAMES, max_size=1))]
    rules = [f"{name} ::= {draw(_RULES)}" for name in names]
    text = "\n".join(rules)
    return text if draw(st.integers(0, 9)) else text[: draw(st.integers(0, len(text)))]


def _grow_regex(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=5).map("".join),
        st.lists(inner, min_size=1, max_size=4).map("|".join),
        inner.map("({})".format),
        inner.map("(?:{})".format),
        st.tuples(inner, _repeats()).map("".join),
    )


_REGEX_ATOMS = st.sampled_from(
    [*"ab.^$|*", "\\d", "\\w", "\\s", "\\b", "\\1", "\\p{L}", "[^a]", "[a-]", "[", "(?=a)", "(?i)"]
)
REGEXES = st.recursive(_REGEX_ATOMS | st.text(max_size=5), _grow_regex, max_leaves=12)
_KEYS = st.sampled_from(["a", "b", "the", "", "\ud800", "a" * 300])
_TYPES = st.sampled_from(
    ["object", "array", "string", "integer", "number", "boolean", "null", "any", "", 5]
)


_SIMPLE = st.one_of(
    st.sampled_from([{}, True, False, None, [], {"type": "null"}, {"$ref": "#"}, {"$ref": "#/x"}]),
    st.fixed_dictionaries({"enum": st.lists(TEXT | NUMBER | st.none(), max_size=4)}),
    st.fixed_dictionaries({"const": TEXT | NUMBER | st.none()}),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "pattern": REGEXES,
            "minLength": NUMBER,
            "maxLength": NUMBER,
            "format": st.sampled_from(["date", "uuid", "email", "unheard-of", ""]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "minimum": NUMBER,
            "maximum": NUMBER,
            "exclusiveMinimum": NUMBER,
            "exclusiveMaximum": NUMBER,
        },
    ),
    st.dictionaries(
        st.sampled_from(
            ["type", "not", "if", "multipleOf", "uniqueItems", "unheard_of", "a" * 999]
        ),
        st.sampled_from(["object", "string", "any", "", 5, True, ["string", "null"], [], {}]),
        max_size=2,
    ),
)


def _grow_schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=4)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": inner,
                "prefixItems": several,
                "minItems": NUMBER,
                "maxItems": NUMBER,
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(_KEYS, inner, max_size=4),
                "required": st.lists(_KEYS, max_size=3),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(REGEXES, inner, max_size=2),
                "minProperties": NUMBER,
                "$defs": st.dictionaries(_KEYS, inner, max_size=2),
            },
        ),
        *(
            st.fixed_dictionaries({name: several}, optional={"type": _TYPES})
            for name in ("anyOf", "oneOf", "allOf")
        ),
    )


SCHEMAS = st.recursive(_SIMPLE, _grow_schema, max_leaves=8)
#: Stops that begin alike, end alike, hold each other, or are many.
STOPS = st.one_of(
    TEXT,
    st.lists(TEXT, max_size=20),
    st.lists(st.text("ab ", min_size=1, max_size=6), max_size=60),
    st.builds(
        lambda one, n: [one * i for i in range(1, n)], st.text(max_size=9), st.integers(2, 100)
    ),
)

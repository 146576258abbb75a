from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sametoken.serving.http.json_spans import (
    find_outside_strings,
    read_object,
    skip_space,
    string_value,
    text_so_far,
    value_end,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@settings(max_examples=80)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_members_stand_where_they_stand(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    span = read_object(text + ", more", 0)
    assert span.end == len(text)
    found = {member.key: json.loads(text[member.start : member.end]) for member in span.members}
    assert found == value


@settings(max_examples=40)
@given(st.dictionaries(st.text(), VALUES, max_size=3))
def test_what_is_found_early_is_found_later(value):
    text = json.dumps(value)
    whole = read_object(text, 0)
    for length in range(1, len(text)):
        span = read_object(text[:length], 0)
        assert span.end is None
        assert not span.broken
        for early, late in zip(span.members, whole.members, strict=False):
            assert (early.key, early.start) == (late.key, late.start)
            assert early.end in (None, late.end)


@pytest.mark.parametrize("text", ["{x", '{"a" 1', '{"a": 1 "b"', '{"a": 1,}', "{,", '{"a": {},x'])
def test_what_is_no_object_is_told(text):
    assert read_object(text, 0).broken


def test_scalars_end_where_something_else_begins():
    assert value_end("12", 0) is None
    assert value_end("12 ", 0) == 2
    assert value_end("true}", 0) == 4
    assert value_end('"a\\"b"', 0) == 6
    assert value_end("", 0) is None
    assert skip_space(" \n\tx", 0) == 3


def test_only_whole_strings_have_a_value():
    text = '{"a": "x\\n\ny", "b": 1, "c": "z'
    first, second, third = read_object(text, 0).members
    assert string_value(text, first) == "x\n\ny"
    assert string_value(text, second) is None
    assert string_value(text, third) is None


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("a\\n\\\\n\\u00e9", "a\n\\n\u00e9"),
        ("\\ud83d\\ude00 \\ud83d. \\ud83dx", "\U0001f600 \ufffd. \ufffdx"),
        ("\\d+ \\u00 .", "\\d+ \\u00 ."),
    ],
)
def test_a_growing_string_has_a_growing_value(written, value):
    text = f'{{"a": "{written}'
    told = ""
    for length in range(len('{"a": "'), len(text) + 1):
        (member,) = read_object(text[:length], 0).members
        found = text_so_far(text[:length], member)
        assert found.startswith(told)
        told = found
    closed = f'{text}"}}'
    (member,) = read_object(closed, 0).members
    assert text_so_far(closed, member) == value
    assert value.startswith(told)


def test_half_of_a_surrogate_pair_is_no_text():
    text = '{"a\\udc00": "x\\ud83d", "b": "\\ud83d\\ude00"}'
    broken, whole = read_object(text, 0).members
    assert (broken.key, string_value(text, broken)) == ("a\ufffd", "x\ufffd")
    assert string_value(text, whole) == "😀"


@settings(max_examples=80)
@given(st.dictionaries(st.text('a<>"\\:,} '), VALUES, min_size=1, max_size=3))
def test_a_mark_is_found_behind_an_object_and_not_in_its_strings(value):
    text = json.dumps(value | {"<>": ["<>"]}, ensure_ascii=False)
    assert find_outside_strings(f"{text}\n<>", "<>", 0) == (len(text) + 1, True)
    assert find_outside_strings(text, "<>", 0) == (-1, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": "<>', (7, False)),
        ('{"a": "<>"', (7, False)),
        ('{"a": "<>" ', (7, False)),
        ('{"a": "<>" b', (7, True)),
        ('{"a": "<>" }', (-1, True)),
        ('{"a": "b" c"<>', (12, True)),
        ('{"a": "<\\"<>', (10, False)),
    ],
)
def test_a_mark_in_a_string_counts_where_the_string_is_none_and_is_final_once_that_is_known(
    text, found
):
    assert find_outside_strings(text, "<>", 0) == found

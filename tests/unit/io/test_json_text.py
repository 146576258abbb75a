"""JSON of which nothing is known yet."""

from __future__ import annotations

import gzip
import json

import pytest

from sametoken.errors import ConfigError
from sametoken.io import json_text
from sametoken.io.json_text import MAX_LINE_BYTES, NotFiniteError, json_lines, parse_json


@pytest.mark.parametrize(
    "value", [None, True, 0, -7, 10**40, 0.1, 1e-300, "é\u2028\0", [], {}, {"a": [1, {"b": "c"}]}]
)
def test_values_are_those_of_the_standard_library(value):
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == value


def test_nesting_is_bounded_far_below_the_stack():
    deep = b"[" * 200 + b"]" * 200
    assert json.dumps(parse_json(deep)).encode() == deep
    for text in (b"[" * 250 + b"]" * 250, b"[" * 10**6, b'{"a":' * 10**6):
        with pytest.raises(ValueError, match="recursion limit"):
            parse_json(text)


@pytest.mark.parametrize("text", [b"", b"{", b"1 2", b"9" * 5000, b'"\xff"', rb'"\udc00"', b"\0"])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError, match="at line 1 column"):
        parse_json(text)


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "1e400", '{"a": [-1e309]}', "9" * 300 + "e9", b"[1e0400]"]
)
def test_what_is_not_finite_is_named(text):
    """The parser reads 1e400 as an infinity, and it would be written as one, which is no JSON."""
    with pytest.raises(NotFiniteError, match="a number is not finite"):
        parse_json(text)
    assert parse_json("[1e308, 1e-400]") == [1e308, 0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_have_their_numbers_and_end_at_a_line_feed_alone(tmp_path, name):
    data = '1\n\n "a\u2028b"\r\n[3]'.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert list(json_lines(tmp_path / name)) == [(1, 1), (3, "a\u2028b"), (4, [3])]


def test_lines_before_a_bad_one_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"1\n2\n{")
    lines = json_lines(tmp_path / "a")
    assert [next(lines), next(lines)] == [(1, 1), (2, 2)]
    with pytest.raises(ConfigError, match=r"line 3 of .* is not JSON"):
        next(lines)
    assert MAX_LINE_BYTES == 64 * 2**20


def test_a_line_has_its_most_bytes(tmp_path, monkeypatch):
    """None is read in two parts, each of which may be a value."""
    monkeypatch.setattr(json_text, "MAX_LINE_BYTES", 4)
    (tmp_path / "a").write_bytes(b"123\n1234\n12345\n")
    lines = json_lines(tmp_path / "a")
    assert next(lines) == (1, 123)
    with pytest.raises(ConfigError, match=r"line 2 of .* has more than 4 bytes"):
        next(lines)

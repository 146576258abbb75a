"""The form of options: types, paths, JSON."""

from __future__ import annotations

import dataclasses

import pytest

from sametoken.errors import ConfigError
from sametoken.types.option_values import (
    json_object,
    option,
    parse_integer,
    require_limits,
    require_path,
    require_types,
    typed,
)


@dataclasses.dataclass(frozen=True)
class Options:
    flag: bool = False
    count: int = 1
    share: float = 0.5
    rates: tuple[float, ...] | None = None
    other: set = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Limited:
    count: int = option(1, "", limits=(1, 3))
    share: float = option(0.5, "", limits=(0.0, 1.0))
    size: int | None = option(None, "", limits=(1, 9))


@pytest.mark.parametrize("text", ["[" * 10**5, '{"k":' + "1" * 5000 + "}", "{", "nan"])
def test_what_is_no_json_object_is_a_typed_error(text):
    with pytest.raises(ConfigError, match="is not"):
        json_object(text, "an option", "{}")


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("bool", [True, False], [0, 1, "yes", None]),
        ("int", [0, 10**30], [True, 1.0, "1", None]),
        ("float", [1, 0.5], [True, "0.5", None]),
        ("str | None", ["x"], [b"x", 1]),
    ],
)
def test_types(annotation, good, bad):
    assert [typed("k", annotation, value) for value in good] == good
    for value in bad:
        with pytest.raises(ConfigError, match=r"k=.* is of the wrong type"):
            typed("k", annotation, value)


def test_every_field_is_checked_and_lists_become_tuples():
    options = Options(rates=[0.5, 1])
    require_types(options)
    assert options.rates == (0.5, 1)
    for wrong in ({"flag": None}, {"count": None}, {"share": "x"}, {"rates": ["x"]}):
        with pytest.raises(ConfigError, match=f"where {next(iter(wrong))}="):
            require_types(Options(**wrong), "where ")


@pytest.mark.parametrize("path", [None, "", "a/b", "/" + "a/" * 1000, "ä" * 127])
def test_paths_that_could_be(path):
    require_path("k", path)


@pytest.mark.parametrize("path", ["\0", "a\0b", "\ud800", "a" * 256, "ä" * 128, "a/" * 2048])
def test_paths_that_could_not_be(path):
    with pytest.raises(ConfigError, match=r"k=.* is not a path"):
        require_path("k", path)


def test_limits_are_allowed_and_what_lies_beyond_is_not():
    for limited in (Limited(), Limited(count=3, share=0.0), Limited(size=7)):
        require_limits(limited)
    require_limits(Limited(count=9), skip=("count",))
    for name, value, kind in (
        *(("count", 0, "an integer"), ("count", 4, "an integer"), ("size", 0, "an integer")),
        *(("share", 1.5, "a number"), ("share", float("nan"), "a number")),
    ):
        with pytest.raises(ConfigError, match=f"{name}=.* is not possible.*Use {kind} from"):
            require_limits(Limited(**{name: value}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        (" 32768 ", 32768),
        ("32k", 32_000),
        ("32K", 32_768),
        ("32Ki", 32_768),
        ("100M", 100 * 2**20),
        ("100m", 100_000_000),
        ("4G", 4 * 2**30),
        ("1GiB", 2**30),
        ("1.5G", 3 * 2**29),
        ("25.6k", 25_600),
        ("2T", 2**41),
        (7, 7),
    ],
)
def test_whole_numbers_may_have_a_unit(text, value):
    assert parse_integer(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1.0001k", "4GB", "4 G", "4kib", "1e3", "0x10", "nan"]
)
def test_other_forms_of_a_number_are_refused(text):
    with pytest.raises(ValueError, match="is not a whole number; write it in full, or as 32k"):
        parse_integer(text)

"""Sizes and counts as people read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sametoken.types.option_values import parse_integer
from sametoken.types.units import counted, in_tokens, in_units


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (25_362_432, "24.2 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (3 * 2**39, "1.5 TiB"),
    ],
)
def test_bytes(num_bytes, text):
    assert in_units(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 tokens"), (1000, "1000 tokens"), (1024, "1K tokens"), (40_960, "40K tokens")],
)
def test_tokens_are_shown_as_options_read_them(count, text):
    assert in_tokens(count) == text
    assert parse_integer(text.removesuffix(" tokens")) == count


def test_the_page_on_models_says_what_the_letters_stand_for():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    assert re.findall(r"\b([kK]) (?:stands )?for (\d+)", page)
    for letter, value in re.findall(r"\b([kK]) (?:stands )?for (\d+)", page):
        assert parse_integer(f"1{letter}") == int(value)


@pytest.mark.parametrize(("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps")])
def test_a_noun_follows_its_number(count, text):
    assert counted(count, "step") == text

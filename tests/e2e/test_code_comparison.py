"""``benchmarks/code/side_by_side.py``: what it lists of our code is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.scripts import imported

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def side_by_side():
    with imported("code", "side_by_side") as modules:
        yield modules.side_by_side


@pytest.fixture(scope="module")
def listed(side_by_side) -> dict:
    return json.loads(side_by_side.SPECIFICATIONS.read_text())["ours"]


@pytest.fixture(scope="module")
def code(side_by_side, listed):
    """Our code, which is parsed once for all tests."""
    return side_by_side.Codebase("ours", CHECKOUT, listed)


def names_of(specification: dict) -> set[tuple[str, str]]:
    parts = specification["stops"].values()
    return {(path, name) for part in parts for path, names in part.items() for name in names}


def test_every_function_that_a_token_passes_exists(side_by_side, listed, code):
    defined = {
        (path, name)
        for path, tree in code.trees.items()
        for name, _ in side_by_side.named_functions(tree)
    }
    assert sorted(names_of(listed) - defined) == []


def test_every_listed_file_exists(listed):
    package = CHECKOUT / listed["package"]
    others = ("beside_engine", "other_lengths", "dense_model", "attention")
    paths = [path for key in others for path in listed[key]]
    assert [path for path in paths if not (package / path).exists()] == []


def test_our_column_alone(side_by_side, capsys):
    side_by_side.main(["--ours", str(CHECKOUT), "--details"])
    shown = capsys.readouterr().out
    assert shown.startswith("|  | ours |\n")
    assert "| one token on a GPU: lines / functions / files | " in shown
    assert "ours, lines on a cpu: " in shown


def test_a_name_that_is_gone_ends_the_comparison(side_by_side, code):
    with pytest.raises(SystemExit, match=r"ours: llm\.py has no LLM\.gone"):
        side_by_side.stops_in(code, "llm.py", {"LLM.gone"})


def test_no_checkout_is_refused(side_by_side, capsys):
    with pytest.raises(SystemExit):
        side_by_side.main([])
    assert "no checkout is named: add one, as in --ours ." in capsys.readouterr().err

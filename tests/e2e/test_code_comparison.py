"""``benchmarks/code/side_by_side.py``: what it lists of our code is there."""

from __future__ import annotations

import json
from functools import cached_property
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


def test_every_listed_file_exists(listed):
    package = CHECKOUT / listed["package"]
    others = ("beside_engine", "other_lengths", "dense_model", "attention")
    paths = [path for key in others for path in listed[key]]
    assert [path for path in paths if not (package / path).exists()] == []


def test_our_column_alone(side_by_side, listed, capsys, monkeypatch):
    """Every function that a token passes is there, or this would end. Other files are not read."""
    stops, read = set().union(*listed["stops"].values()), side_by_side.Codebase.files.func
    few = cached_property(lambda code: {k: text for k, text in read(code).items() if k in stops})
    few.__set_name__(side_by_side.Codebase, "files")
    monkeypatch.setattr(side_by_side.Codebase, "files", few)
    side_by_side.main(["--ours", str(CHECKOUT), "--details"])
    shown = capsys.readouterr().out
    assert shown.startswith("|  | ours |\n")
    assert "| one token on a GPU: lines / functions / files | " in shown
    assert "ours, lines on a cpu: " in shown


def test_a_name_that_is_gone_ends_the_comparison(side_by_side, listed):
    types = side_by_side.Codebase("ours", CHECKOUT, listed | {"package": "src/sametoken/types"})
    with pytest.raises(SystemExit, match=r"ours: outputs\.py has no RequestOutput\.gone"):
        side_by_side.stops_in(types, "outputs.py", {"RequestOutput.gone"})


def test_no_checkout_is_refused(side_by_side, capsys):
    with pytest.raises(SystemExit):
        side_by_side.main([])
    assert "no checkout is named: add one, as in --ours ." in capsys.readouterr().err

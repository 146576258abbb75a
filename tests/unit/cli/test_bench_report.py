"""``sametoken bench report``: lines, JSON and a page, of the same numbers."""

from __future__ import annotations

import json
from functools import partial

import pytest

from helpers.bench_engine import document
from helpers.cli import invoke
from sametoken.bench.documents import write_json

report = partial(invoke, "bench", "report")


@pytest.fixture
def runs(tmp_path):
    write_json(tmp_path / "main.json", document())
    write_json(tmp_path / "change.json", document(speed=2.0))
    return [str(tmp_path / "main.json"), str(tmp_path / "change.json")]


def test_lines_and_page(runs, tmp_path):
    page = tmp_path / "report.html"
    result = report(*runs, "--html", str(page), "--label", "old", "--label", "new")
    assert result.exit_code == 0, result.output
    assert "100.00" in result.stdout
    assert "400.00" in result.stdout
    assert "<title>new against old: benchmark</title>" in page.read_text()


def test_lines_show_what_differs(runs, tmp_path):
    other = document()
    other["settings"] = {**other["settings"], "asked": {"model": "another"}}
    write_json(tmp_path / "other.json", other)
    alike, different = report(*runs).stdout, report(*runs, str(tmp_path / "other.json")).stdout
    assert "model" not in alike
    assert all(text in different for text in ("model", "target", "another"))


def test_a_value_of_another_kind_is_shown(tmp_path):
    write_json(tmp_path / "odd.json", document() | {"benchmark": ["latency"]})
    assert report(str(tmp_path / "odd.json")).exit_code == 0


def test_names_are_shown_as_they_are(runs):
    """rich would read brackets as styles, and a closing one without its opening is an error."""
    result = report(*runs, "--label", "[v1]", "--label", "a[/b] :cat:")
    assert result.exit_code == 0, result.output
    assert "[v1]" in result.stdout
    assert "a[/b] :cat:" in result.stdout


def test_json(runs):
    value = json.loads(report(*runs, "--json").stdout)
    assert [cell["numbers"]["tokens_per_second"] for cell in value["cells"]] == [100, 200, 200, 400]


def test_a_missing_file_is_one_error(runs):
    result = report(*runs, "nowhere.json")
    assert result.exit_code == 2
    assert "nowhere.json cannot be read" in result.stderr
    assert result.stdout == ""

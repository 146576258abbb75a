"""``sametoken bench sweep``: axes from options, files and presets; exit codes of cells."""

from __future__ import annotations

import json
from functools import partial

import pytest

from helpers.cli import invoke
from sametoken.bench import sweep as sweep_module
from sametoken.bench.sweep import CellStore

NGRAM = '{"method": "ngram"}'
run = partial(invoke, "bench", "sweep")


@pytest.fixture
def engine(monkeypatch):
    """Stands in for processes; cells of 99 tokens fail."""

    def launch(directory, cells):
        store = CellStore(directory)
        for cell in cells:
            if cell.output_len == 99:
                store.fail(cell, "does not fit")
            else:
                result = {"tokens_per_second": 5.0, "tpot_median": None, "acceptance_length": 1.5}
                store.finish(cell, {"results": [result]})
        return None, ""

    monkeypatch.setattr(sweep_module, "launch_engine", launch)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_spec_without_axes_is_told_what_it_holds(tmp_path, text):
    spec = tmp_path / "sweep.json"
    spec.write_text(text)
    result = run(tmp_path / "new", "--spec", str(spec), "--dry-run")
    assert result.exit_code == 2
    assert 'Give axes, as in {"concurrency": [1, 8]}' in result.stderr.replace("\n", " ")


def test_a_dry_run_shows_the_preset_and_measures_nothing(tmp_path):
    arguments = ("--preset", "vllm-38311", "--model", "m", "--drafter", NGRAM, "--drafter", "none")
    result = run(tmp_path / "new", *arguments, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == 2 * 2 * 3
    assert {row["status"] for row in rows} == {"to measure"}
    assert {row["cell"]["output_len"] for row in rows} == {1, 1024}
    assert rows[0]["cell"]["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}
    assert not (tmp_path / "new").exists()


def test_heads_and_models_of_one_name_are_told_apart_in_the_table(tmp_path):
    heads = [json.dumps({"method": "eagle3", "model": f"{one}/head"}) for one in ("a/x", "b/y")]
    arguments = [("--drafter", one) for one in (*heads, "ngram")]
    models = ("--model", "1/target", "--model", "2/target", "--dry-run")
    found = run(tmp_path, *models, *(word for pair in arguments for word in pair))
    assert found.exit_code == 0, found.output
    rows = [line.split("│")[1:3] for line in found.stdout.splitlines() if "to measure" in line]
    drafters = ("eagle3 x/head 3", "eagle3 y/head 3", "ngram 3")
    assert [[one.strip() for one in row] for row in rows] == [
        [model, drafter] for model in ("1/target", "2/target") for drafter in drafters
    ]


def test_a_drafter_is_a_method_s_name_or_json(tmp_path):
    arguments = ("--model", "m", "--dry-run", "--json")
    named = run(tmp_path, *arguments, "--drafter", "ngram")
    assert named.exit_code == 0, named.output
    written = run(tmp_path, *arguments, "--drafter", '{"method": "ngram"}')
    assert json.loads(named.stdout) == json.loads(written.stdout)


def test_results_are_shown_and_failures_make_the_exit_code(tmp_path, engine):
    result = run(tmp_path, "--model", "m", "--output-len", "1,99", "--dtype", "float32")
    assert result.exit_code == 1
    assert "done" in result.stdout
    assert "does not fit" in result.stderr
    rows = json.loads(run(tmp_path, "--model", "m", "--output-len", "1", "--json").stdout)
    # Another dtype is another cell.
    assert [row["status"] for row in rows] == ["done"]
    assert rows[0]["cell"]["engine"] == {"max_num_seqs": 1, "enable_prefix_caching": False}
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_file_gives_axes_that_options_override(tmp_path, engine):
    spec = tmp_path / "sweep.json"
    spec.write_text(
        json.dumps({"model": "m", "output_len": [1, 2], "engine": {"dtype": "float32"}})
    )
    arguments = ("--spec", str(spec), "--temperature", "0,0.8", "--output-len", "2", "--json")
    rows = json.loads(run(tmp_path / "out", *arguments).stdout)
    assert [(row["cell"]["output_len"], row["cell"]["temperature"]) for row in rows] == [
        (2, 0.0),
        (2, 0.8),
    ]
    assert rows[0]["cell"]["engine"]["dtype"] == "float32"


def test_a_file_names_drafters_as_the_command_line_does(tmp_path):
    spec = tmp_path / "sweep.json"
    spec.write_text('{"model": "m", "drafter": ["none", "ngram"], "output-len": 8}')
    found = run(tmp_path, "--spec", str(spec), "--dry-run", "--json")
    assert found.exit_code == 0, found.output
    arguments = ("--model", "m", "--drafter", "none", "--drafter", "ngram", "--output-len", "8")
    assert json.loads(found.stdout) == json.loads(
        run(tmp_path, *arguments, "--dry-run", "--json").stdout
    )


def test_a_directory_that_cannot_be_made_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sweep_module, "launch_engine", lambda *given: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    result = run(tmp_path / "file", "--model", "m")
    assert result.exit_code == 2
    assert "file cannot be made" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ((), "has no model"),
        (("--model", "m", "--output-len", "1;2"), "not a list of numbers"),
        (("--model", "m", "--drafter", "[1]"), "Give one, a method's name, or none"),
        (("--model", "m", "--drafter", "ngramm"), "Did you mean 'ngram'"),
        (("--model", "m", "--drafter", "{}"), "neither a method nor a model"),
        (("--model", "m", "--preset", "vllm"), "'vllm' is not known"),
    ],
)
def test_wrong_use_exits_with_2(tmp_path, arguments, cause):
    result = run(tmp_path, *arguments)
    assert result.exit_code == 2
    assert cause in result.stderr

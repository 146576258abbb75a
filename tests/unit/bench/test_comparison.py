"""Reports hold the numbers of their files, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.bench_engine import document
from sametoken.bench.comparison import METRICS, compare_runs
from sametoken.bench.documents import embedded_json, render_report, write_json
from sametoken.errors import ConfigError


@pytest.fixture
def runs(tmp_path):
    write_json(tmp_path / "main.json", document())
    write_json(tmp_path / "change.json", document(speed=1.25))
    return [tmp_path / "main.json", tmp_path / "change.json"]


def test_every_number_of_every_result_is_there(runs):
    data = compare_runs(runs)
    assert [run["label"] for run in data["runs"]] == ["main", "change"]
    assert len(data["cells"]) == 4
    for cell, (source, place) in zip(
        data["cells"], [(source, i) for source in runs for i in (0, 1)], strict=True
    ):
        result = json.loads(source.read_text())["results"][place]
        known = {metric.name for metric in METRICS}
        expected = {k: v for k, v in result.items() if k in known and v is not None}
        assert cell["numbers"] == expected
        assert cell["acceptance_per_position"] == result["acceptance_per_position"]
        assert cell["repeats"]["tokens_per_second"] == [
            run["tokens_per_second"] for run in result["runs"]
        ]
        # A repeat without the number is no spread of it.
        assert "acceptance_length" not in cell["repeats"]
        assert cell["traces"] == result["traces"]
        assert cell["workload"]["concurrency"] == result["concurrency"]


def test_series_differ_by_engine_and_workloads_by_what_is_asked(runs, tmp_path):
    write_json(tmp_path / "plain.json", document(method=None))
    data = compare_runs([*runs, tmp_path / "plain.json"], ["a", "b", "c"])
    engines = [cell["engine"] for cell in data["cells"][::2]]
    assert [e["drafter"] for e in engines] == ["ngram", "ngram", "none"]
    assert [e["num_speculative_tokens"] for e in engines] == [2, 2, 0]
    assert engines[0]["model"] == "target"
    assert data["cells"][0]["workload"] == data["cells"][4]["workload"]


def test_a_server_that_counts_drafts_is_not_plain(tmp_path):
    server = document(k=3)
    server["settings"] = {"asked": {"model": "m", "speculative_config": None}, "server": {}}
    write_json(tmp_path / "vllm.json", server)
    engine = compare_runs([tmp_path / "vllm.json"])["cells"][0]["engine"]
    assert (engine["drafter"], engine["num_speculative_tokens"]) == ("unknown drafter", 3)


def test_a_directory_of_a_sweep_is_one_run_with_its_failures(tmp_path):
    cell = {"model": "m", "speculative_config": None, "output_len": 9}
    write_json(tmp_path / "s" / "a.json", document() | {"cell": cell, "status": "done"})
    failed = {"cell": cell, "status": "failed", "error": "does not fit"}
    write_json(tmp_path / "s" / "b.json", failed)
    data = compare_runs([tmp_path / "s"])
    assert (len(data["runs"]), len(data["cells"])) == (1, 2)
    (failure,) = data["failures"]
    assert failure["error"] == "does not fit"
    assert "output 9" in failure["cell"]


def test_loads_that_were_not_measured_are_failures(tmp_path):
    loads = [{"concurrency": 8, "request_rate": 2.0}, {"concurrency": None, "request_rate": None}]
    write_json(tmp_path / "run.json", document(missing_loads=loads))
    data = compare_runs([tmp_path / "run.json"])
    assert len(data["cells"]) == 2
    assert [f"{one['cell']}: {one['error']}" for one in data["failures"]] == [
        "at once 8, requests/s 2.0: not measured",
        "all at once: not measured",
    ]


def asked(model: str, drafter: str) -> dict:
    spec = {"method": "eagle3", "num_speculative_tokens": 2, "model": drafter}
    given = {"asked": {"model": model, "speculative_config": spec}, "resolved": {}}
    return document(settings=given)


def test_models_of_one_name_are_told_apart_by_their_directories(tmp_path):
    paths = [("runs/a/model", "one/head"), ("runs/b/model", "two/head"), ("c/other", "head")]
    for number, each in enumerate(paths):
        write_json(tmp_path / "s" / f"{number}.json", asked(*each))
    engines = [cell["engine"] for cell in compare_runs([tmp_path / "s"])["cells"][::2]]
    assert [one["model"] for one in engines] == ["a/model", "b/model", "other"]
    assert [one["drafter"] for one in engines] == [
        "eagle3 one/head",
        "eagle3 two/head",
        "eagle3 head",
    ]


def test_drafters_that_differ_in_options_are_numbered_and_failures_have_their_names(tmp_path):
    for number, more in enumerate(({}, {"token_map": "ids.json"})):
        value = asked("m", "one/head")
        value["settings"]["asked"]["speculative_config"] |= more
        write_json(tmp_path / "s" / f"{number}.json", value)
    spec = {"method": "eagle3", "num_speculative_tokens": 2, "model": "two/head"}
    failed = {"cell": {"model": "m", "speculative_config": spec}, "error": "does not fit"}
    write_json(tmp_path / "s" / "failed.json", failed)
    data = compare_runs([tmp_path / "s"])
    engines = [cell["engine"]["drafter"] for cell in data["cells"][::2]]
    assert engines == ["eagle3 one/head (1)", "eagle3 one/head (2)"]
    assert "drafter eagle3 two/head" in data["failures"][0]["cell"]


def test_cells_that_differ_in_nothing_shown_are_numbered(tmp_path):
    for name in ("1", "2", "3"):
        write_json(tmp_path / "s" / f"{name}.json", document())
    cells = compare_runs([tmp_path / "s"])["cells"][::2]
    names = [cell["workload"]["benchmark"] for cell in cells]
    assert names == [f"latency, 3 batches{more}" for more in ("", " (2)", " (3)")]


def test_equal_names_are_numbered(tmp_path):
    for folder in ("x", "y"):
        write_json(tmp_path / folder / "run.json", document())
    paths = [tmp_path / folder / "run.json" for folder in ("x", "y")]
    assert [run["label"] for run in compare_runs(paths)["runs"]] == ["run (1)", "run (2)"]


def test_a_directory_has_its_whole_name(tmp_path, monkeypatch):
    write_json(tmp_path / "v1.2" / "run.json", document())
    monkeypatch.chdir(tmp_path / "v1.2")
    for path in (tmp_path / "v1.2", Path()):
        assert [run["label"] for run in compare_runs([path])["runs"]] == ["v1.2"]


def test_labels_must_fit(runs):
    with pytest.raises(ConfigError, match="1 labels were given for 2 runs"):
        compare_runs(runs, ["one"])
    with pytest.raises(ConfigError, match="same label"):
        compare_runs(runs, ["one", "one"])


def test_data_cannot_end_its_element(runs):
    data = compare_runs(runs)
    text = embedded_json(data)
    assert "<" not in text
    assert json.loads(text) == data


def test_a_page_needs_nothing_from_elsewhere(runs):
    page = render_report("a < b", compare_runs(runs))
    assert "<title>a &lt; b</title>" in page
    assert page.count("</script>") == 3
    markup = page[: page.index('<script type="application/json"')]
    for reference in ("src=", "@import", "url(", "http:", "https:"):
        assert reference not in markup


def test_a_run_of_nothing_is_refused_after_one_that_failed(tmp_path):
    failed, empty = tmp_path / "failed.json", tmp_path / "empty.json"
    failed.write_text(json.dumps({"cell": {"model": "m"}, "status": "failed", "error": "boom"}))
    empty.write_text("{}")
    assert compare_runs([failed])["runs"]
    with pytest.raises(ConfigError, match="holds no results"):
        compare_runs([failed, empty])


@pytest.mark.parametrize(("dataset", "shown"), [("random", 8), (None, 8), ("gsm8k", None)])
def test_random_prompts_have_a_length(runs, tmp_path, dataset, shown):
    document = json.loads(runs[0].read_text())
    document["workload"] |= {"dataset": dataset, "input_len": 8}
    (tmp_path / "run.json").write_text(json.dumps(document))
    cells = compare_runs([tmp_path / "run.json"])["cells"]
    assert {cell["workload"]["input_len"] for cell in cells} == {shown}

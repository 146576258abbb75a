"""Reports in a browser, from disk: no errors, filters that filter, the numbers of the files."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from helpers.bench_engine import document
from helpers.browser import chromium, needs_chromium
from sametoken.audit.compare import CORRUPTION, Comparison, Divergence, TextDefect
from sametoken.audit.diagnosis import Diagnosis
from sametoken.audit.verdict import Verdict
from sametoken.bench.acceptance import Profile
from sametoken.bench.documents import write_json
from sametoken.bench.measure import Window
from sametoken.cli.main import app

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    write_json(directory / "main.json", document())
    write_json(directory / "change.json", document(speed=1.25))
    write_json(directory / "plain.json", document(method=None, synthetic=["dummy weights"]))
    return [directory / f"{name}.json" for name in ("main", "change", "plain")]


@pytest.fixture(scope="module")
def page_path(sources, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    result = CliRunner().invoke(app, ["bench", "report", *map(str, sources), "--html", str(path)])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def tab():
    """One for all tests: a page loaded anew in it needs no new process."""
    with chromium() as browser:
        yield browser.new_context(offline=True, color_scheme="light").new_page()


@pytest.fixture
def page(tab, page_path):
    """The page with all that it logs and every address that it asks for."""
    logged, asked = [], []
    listeners = {
        "console": lambda message: logged.append(message.text),
        "pageerror": lambda error: logged.append(str(error)),
        "request": lambda request: asked.append(request.url),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    tab.goto(page_path.as_uri())
    tab.wait_for_selector("#comparison table")
    yield tab
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    assert logged == []
    assert page_path.as_uri() in asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def shown_numbers(page):
    """(run, requests at once, metric) to the exact value, of what the table shows."""
    cells = page.eval_on_selector_all(
        "#comparison td[data-metric]",
        "cells => cells.map(c => [c.dataset.run, c.dataset.workload, c.dataset.metric,"
        " c.dataset.value, c.textContent])",
    )
    return {
        (run, json.loads(workload)["concurrency"], metric): (json.loads(value), text)
        for run, workload, metric, value, text in cells
    }


def test_charts_draw_the_numbers_and_tables_show_those_of_the_files(page, sources):
    (_, four) = json.loads(sources[0].read_text())["results"]
    pareto = page.evaluate("document.getElementById('pareto').data")
    assert [trace["name"] for trace in pareto][-1] == "frontier"
    main = next(trace for trace in pareto if trace["name"].startswith("main"))
    assert main["x"][1] == pytest.approx(1000 / four["tpot_median"])
    assert main["y"][1] == four["tokens_per_second"]
    # The faster run alone is on the frontier.
    change = next(trace for trace in pareto if trace["name"].startswith("change"))
    assert sorted(pareto[-1]["y"]) == sorted(change["y"])

    found = {}
    for view in ("throughput", "latency", "speculation"):
        page.click(f"#views [data-view={view}]")
        found |= shown_numbers(page)
    expected = {}
    for source in sources:
        for result in json.loads(source.read_text())["results"]:
            for metric in ("tokens_per_second", "ttft_median", "tpot_mean", "acceptance_length"):
                if result[metric] is not None:
                    expected[source.stem, result["concurrency"], metric] = result[metric]
    assert {key: found[key][0] for key in expected} == expected
    assert found["main", 1, "ttft_median"][1].startswith("12.35")
    assert ("plain", 1, "acceptance_length") not in found
    embedded = json.loads(page.text_content("#data"))
    assert len(embedded["cells"]) == 6


def test_changes_are_against_the_baseline_and_its_spread(page):
    cell = page.locator("td[data-metric=tokens_per_second][data-run=change]").first
    assert float(cell.locator(".delta").get_attribute("data-change")) == pytest.approx(0.25)
    assert "better" in cell.locator(".delta").get_attribute("class")
    assert "123.8 … 126.3" in cell.inner_text()
    assert page.inner_text("#about") == "target · random tokens · a chip · 2026-01-01"
    slower = page.locator("td[data-metric=ttft_median][data-run=change] .delta").first
    assert float(slower.get_attribute("data-change")) == pytest.approx(-0.2)
    assert slower.get_attribute("class") == "delta unknown"
    unknown = page.locator("td[data-metric=ttft_median][data-run=change]").first
    assert unknown.inner_text().endswith("one run: no spread known")
    # The same numbers lie within each other's spread.
    same = page.locator("td[data-metric=tokens_per_second][data-run=plain] .delta").first
    assert same.get_attribute("title") == "within the spread"
    page.select_option("[data-filter='compared with']", label="run change")
    main = page.locator("td[data-metric=tokens_per_second][data-run=main] .delta").first
    assert float(main.get_attribute("data-change")) == pytest.approx(-0.2)


def test_filters_filter_tables_and_charts(page):
    assert {key[0] for key in shown_numbers(page)} == {"main", "change", "plain"}
    page.select_option("[data-filter='run']", label="change")
    assert {key[0] for key in shown_numbers(page)} == {"change"}
    traces = page.evaluate("document.getElementById('bars').data.map(trace => trace.name)")
    assert traces == ["change: ngram, k=2"]
    page.select_option("[data-filter='at once']", label="4")
    assert {key[1] for key in shown_numbers(page)} == {4}
    page.select_option("[data-filter='drafter']", label="none")
    assert "Nothing matches" in page.inner_text("#comparison")
    page.select_option("[data-filter='run']", label="all")
    assert {key[0] for key in shown_numbers(page)} == {"plain"}
    assert page.is_hidden("#acceptance-panel")


def test_the_spec_decode_view_has_acceptance_per_position(page):
    page.click("#views [data-view=speculation]")
    assert page.is_hidden("#pareto")
    rates = page.eval_on_selector_all(
        "#acceptance-table td[data-run=main]",
        "cells => cells.map(c => [c.dataset.position, c.dataset.value])",
    )
    assert rates == [["1", "0.75"], ["2", "0.5"]] * 2
    drawn = page.evaluate("document.getElementById('acceptance').data[0].y")
    assert drawn == [75, 50]
    assert page.get_attribute("#views [data-view=speculation]", "aria-pressed") == "true"


def test_the_view_of_requests_has_tokens_by_window_and_a_time_line(page):
    page.click("#views [data-view=requests]")
    kinds = page.eval_on_selector_all(
        "#tokens [data-kind]", "tokens => tokens.map(t => [t.dataset.kind, t.textContent])"
    )
    assert kinds == [
        ["plain", "</script>"],
        ["accepted", " <b>"],
        ["accepted", "one"],
        ["bonus", "↵\n"],
        ["corrected", " two"],
    ]
    assert page.text_content("#tokens .refused") == "\N{MINUS SIGN}2"
    windows = page.eval_on_selector_all("#tokens .window", "all => all.map(w => w.ariaLabel)")
    assert windows[1] == "window 2: 2 drafts, 2 accepted"
    assert "5 tokens in 3 steps" in page.inner_text("#token-note")
    page.select_option("#timeline-cell", index=1)
    bars = page.evaluate("document.getElementById('timeline').data.map(t => [t.name, t.x.length])")
    assert bars == [["until the first token", 4], ["tokens arrive", 4]]


def test_what_is_made_up_is_said_controls_have_names_and_the_theme_changes(page):
    unnamed = page.evaluate(
        "[...document.querySelectorAll('select')].filter(c => !c.labels.length).length"
        " + [...document.querySelectorAll('button:not(.modebar-btn)')]"
        ".filter(c => !c.textContent.trim()).length"
    )
    assert unnamed == 0
    assert page.inner_text("#synthetic") == "DUMMY WEIGHTS: only times mean anything."
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light


def test_markup_in_names_is_shown_as_it_is(sources, tab, tmp_path):
    """Plotly makes links and styles of it."""
    name = '<a href="https://example.org">fast</a>'
    path = tmp_path / "report.html"
    labels = ["--label", name, "--label", "main"]
    arguments = [*map(str, sources[:2]), *labels, "--html", str(path)]
    assert CliRunner().invoke(app, ["bench", "report", *arguments]).exit_code == 0
    tab.goto(path.as_uri())
    tab.wait_for_selector("#bars .legendtext")
    assert name in tab.eval_on_selector_all(
        "#bars .legendtext", "all => all.map(e => e.textContent)"
    )
    assert tab.locator("#bars svg a").count() == 0


@pytest.fixture(scope="module")
def audit_path(tmp_path_factory):
    """An audit with a divergence, a defect and acceptance."""
    window = Window(8, 3, 1)
    divergence = Divergence("gsm8k-1@0", 9, 5, None, 0.25, window, 2, CORRUPTION)
    verdict = Verdict(
        "target with ngram, k=3",
        "target, plain",
        (Comparison("as configured", 12, (divergence,)), Comparison("logits", 2, (), 40, 0)),
        repeats=(Comparison("plain, again", 12, ()),),
        noise=0.0,
        defects=(TextDefect("gsm8k-1@0", "truncated", 9, "9 tokens"),),
        diagnosis=Diagnosis({"running": Profile((8, 4), (4, 2))}, (), ()),
        texts={5: "<b>"},
        workload={
            "model": "target",
            "dataset": "gsm8k",
            "prompts": 6,
            "temperatures": [0, 0.8],
            "max_tokens": 48,
        },
        environment={"date": "2026-01-01T10:20:30+00:00", "sametoken": "0.1.0", "device": "a chip"},
    )
    path = tmp_path_factory.mktemp("audit") / "audit.html"
    path.write_text(verdict.html(), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_both_reports_fit_and_say_what_was_measured_on_the_first_screen(
    tab, page_path, audit_path, width, scheme
):
    tab.set_viewport_size({"width": width, "height": 800})
    tab.emulate_media(color_scheme=scheme)
    grounds = set()
    for path, told in (
        (page_path, "target · random tokens · a chip · 2026-01-01"),
        (audit_path, "target · gsm8k · a chip · 2026-01-01 10:20"),
    ):
        tab.goto(path.as_uri())
        about = tab.locator("#about")
        assert about.inner_text() == told
        assert about.bounding_box()["y"] < 800
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate("document.documentElement.dataset.theme") == scheme
        grounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 1, "one design"


def test_the_audit_s_page_shows_what_differs(tab, audit_path):
    tab.goto(audit_path.as_uri())
    assert tab.inner_text("#verdict") == "corrupted"
    rows = {
        name: tab.locator(f"#{name} tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )
        for name in ("runs", "divergences", "defects", "acceptance")
    }
    assert rows["runs"] == [
        ["plain, again", "12 answers", "none", ""],
        ["as configured", "12 answers", "1", "1 corruption"],
        ["logits", "40 positions, bit by bit", "none", ""],
    ]
    (divergence,) = rows["divergences"]
    assert divergence[1:5] == ["9", '"<b>"', "the end", "0.250"]
    assert divergence[5:] == ["draft 2 of 3, 1 accepted", "corruption"]
    assert rows["defects"] == [["gsm8k-1@0", "truncated", "9", "9 tokens"]]
    assert rows["acceptance"] == [["running", "50.0%", "50.0%"]]

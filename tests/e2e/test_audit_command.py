"""``sametoken audit`` as a user runs it, on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.adapters import ATTENTION, write_adapter
from helpers.browser import chromium, needs_chromium
from helpers.chat_model import write_chat_model
from helpers.serving import accept_one_more
from sametoken.audit import engine_audit
from sametoken.audit.verdict import NO_DRAFT
from sametoken.cli.main import app
from sametoken.scheduler.scheduler import Scheduler

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
SMALL = ("--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "300", "--dataset", "random")
SMALL += ("--limit", "3", "--max-tokens", "12", "--concurrency", "3", "--alone", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    cached = tmp_path_factory.mktemp("hub") / "models--tiny--chat" / "snapshots" / "0123"
    return str(write_chat_model(cached))


def audit(*arguments: str):
    return CliRunner().invoke(app, ["audit", *arguments])


def test_a_clean_engine_exits_with_0(model, tmp_path):
    page = tmp_path / "audit.html"
    result = audit(model, *SMALL, "--speculative-config", NGRAM, "--json", "--html", str(page))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["summary"] == "identical"
    counts = f"with {found['num_drafts']} drafts verified in {found['num_tokens']} tokens"
    assert found["headline"] == f"identical, {counts}"
    assert found["num_tokens"] > found["comparisons"][0]["num_requests"]
    assert found["subject"] == "chat with ngram, k=3"
    assert {run["num_requests"] for run in found["comparisons"]} == {2, 6}
    assert found["num_drafts"] >= found["diagnosis"]["profiles"]["running"]["judged"][0] > 0
    assert json.loads(embedded(page)) == found


def test_an_adapter_is_audited(model, tmp_path, monkeypatch):
    adapter, chosen, add = write_adapter(tmp_path, Path(model), ATTENTION), set(), Scheduler.add

    def noting(self, request):
        chosen.add(request.adapter)
        return add(self, request)

    monkeypatch.setattr(Scheduler, "add", noting)
    own = ("--lora-modules", f"sql={adapter}", "--lora-request", "sql")
    result = audit(model, *SMALL, *own, "--speculative-config", NGRAM, "--json")
    assert result.exit_code == 0, result.output
    assert (json.loads(result.stdout)["workload"]["adapter"], chosen) == ("sql", {1})


def test_an_engine_that_verified_no_draft_exits_with_1(model):
    ngram = ("--speculative-config", NGRAM, "--no-diagnose")
    result = audit(model, *SMALL, *ngram, "--limit", "1", "--max-tokens", "1")
    assert result.exit_code == 1, result.output
    assert result.stdout.splitlines()[0].endswith(NO_DRAFT)


def test_a_corrupt_engine_exits_with_1(model, monkeypatch):
    accept_one_more(monkeypatch)
    result = audit(model, *SMALL, "--speculative-config", NGRAM, "--no-diagnose")
    assert result.exit_code == 1, result.output
    assert "corrupted" in result.stdout
    assert "in place of" in result.stdout


def embedded(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    return text[start : text.index("</script>", start)]


@needs_chromium
def test_the_report_works_in_a_browser(model, tmp_path):
    page_file = tmp_path / "audit.html"
    result = audit(model, *SMALL, "--speculative-config", NGRAM, "--json", "--html", str(page_file))
    found = json.loads(result.stdout)
    errors: list[str] = []
    with chromium() as browser:
        page = browser.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(page_file.as_uri())
        assert page.inner_text("#verdict") == found["headline"]
        runs = page.locator("#runs tbody tr")
        assert runs.count() == len(found["comparisons"]) + len(found["repeats"])
        alone = page.locator("#acceptance tbody tr", has_text="alone").locator("td.rate")
        judged = found["diagnosis"]["profiles"]["alone"]["judged"]
        assert alone.count() == len([count for count in judged if count])
        for part in (found["workload"]["dataset"], found["environment"]["device"]):
            assert part in page.inner_text("#about")
    assert errors == []


HEAD = '{"method": "eagle3", "model": "/no/head"}'


@pytest.mark.parametrize(
    ("speculation", "max_tokens", "words"),
    [
        (HEAD, "12", "'/no/head' is neither a path"),
        (NGRAM, "1000000", "with 1000000 of an answer are more than max_model_len=1024"),
    ],
)
def test_what_does_not_fit_the_model_is_named_before_it_answers(
    model, monkeypatch, speculation, max_tokens, words
):
    monkeypatch.setattr(engine_audit, "_baseline", None)
    result = audit(model, *SMALL, "--speculative-config", speculation, "--max-tokens", max_tokens)
    assert result.exit_code == 2
    assert words in result.output

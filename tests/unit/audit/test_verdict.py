"""Verdicts in words, from runs that are made up."""

from __future__ import annotations

import json

import pytest

from sametoken.audit import verdict as words
from sametoken.audit.asks import Answer
from sametoken.audit.compare import Comparison, TextDefect, compare
from sametoken.audit.diagnosis import Diagnosis
from sametoken.audit.verdict import Verdict
from sametoken.bench.acceptance import Profile

PLAIN = {
    str(i): Answer(tuple(range(10)), top=(((0, -0.1), (1, -0.1 - margin)),) * 10)
    for i, margin in enumerate((0.01, 0.01, 2.0, 2.0))
}


def changed(*requests: str):
    """The plain answers with another last token in some."""
    return {
        name: Answer((*answer.tokens[:9], 99)) if name in requests else answer
        for name, answer in PLAIN.items()
    }


def run(*requests: str, name: str = "run"):
    return compare(name, PLAIN, changed(*requests), noise=0.05)


@pytest.mark.parametrize(
    ("spoilt", "own", "summary"),
    [
        ((), (), words.IDENTICAL),
        (("0",), (), words.TIES_ONLY),
        (("0", "2"), (), words.CORRUPTED),
        (("0",), ("1",), words.NONDETERMINISTIC),
        (("0", "1"), ("1",), words.NONDETERMINISTIC),
        (("2",), ("3",), words.NONDETERMINISTIC),
        (("2", "3"), ("3",), words.CORRUPTED),
        (("2",), ("0",), words.CORRUPTED),
    ],
)
def test_the_summary(spoilt, own, summary):
    found = Verdict("a", "b", (run(*spoilt),), repeats=(run(*own),))
    assert found.summary == summary
    assert found.identical == (not spoilt)


@pytest.mark.parametrize(
    ("spoilt", "num_drafts", "summary", "more", "says"),
    [
        ((), 0, words.NO_DRAFT, "", "0"),
        ((), 1, words.IDENTICAL, ", with 1 draft verified in 40 tokens", "1"),
        (
            (),
            None,
            words.IDENTICAL,
            ", with an unknown number of drafts verified in 40 tokens",
            "unknown",
        ),
        (("0", "2"), 0, words.CORRUPTED, "", "0"),
    ],
)
def test_equal_tokens_prove_no_more_than_the_drafts_do(spoilt, num_drafts, summary, more, says):
    found = Verdict("a", "b", (run(*spoilt),), num_tokens=40, num_drafts=num_drafts)
    first, *others = found.lines()
    assert first == f"a against b: {summary}{more}"
    assert found.as_json()["headline"] == summary + more
    assert found.identical == found.as_json()["identical"] == (summary == words.IDENTICAL)
    assert f"  drafts verified: {says}" in others


def test_samples_are_nobody_s_promise():
    sampled = compare("run", PLAIN, changed("0", "2"), noise=0.05, sampled={"2"})
    assert Verdict("a", "b", (sampled,)).summary == words.SAMPLES_DIFFER


def test_bits_that_differ_are_corruption():
    logits = Comparison("logits", 4, (), num_logits=40, num_logits_differ=1)
    assert Verdict("a", "b", (logits,)).summary == words.CORRUPTED


def test_text_defects_are_corruption():
    defect = TextDefect("0", "truncated", 3, "short")
    assert Verdict("a", "b", (run("0"),), defects=(defect,)).summary == words.CORRUPTED


def test_the_report_holds_the_json():
    found = Verdict("a", "b", (run("0", "2"),), noise=0.05, texts={99: "</script>"})
    page = found.html()
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert data == json.loads(json.dumps(found.as_json()))
    assert len(data["comparisons"][0]["divergences"]) == 2


@pytest.mark.parametrize(
    ("num_first", "says"),
    [(49, "too few drafts for a finding"), (50, "no cause for concern found")],
)
def test_nothing_found_in_few_drafts_is_no_all_clear(num_first, says):
    diagnosis = Diagnosis({"running": Profile((num_first,), (0,))}, (), ())
    found = Verdict("a", "b", (run("0"),), diagnosis=diagnosis)
    assert says in "\n".join(found.lines())
    assert found.as_json()["has_few_drafts"] == (num_first < 50)


def test_the_lines_name_token_margin_and_kind():
    text = "\n".join(Verdict("a", "b", (run("2"),), noise=0.05, texts={99: "x"}).lines())
    assert "1 of 4 requests differ (1 corruption)" in text
    assert "2, token 9: 'x' in place of 9; margin 2; corruption" in text

"""Servers beside an engine: their candidates are texts, whatever their tokens are."""

from __future__ import annotations

import re

import pytest

from sametoken.audit.asks import Answer, AuditRequest
from sametoken.audit.compare import CORRUPTION, TIE
from sametoken.audit.server_audit import OF_LOOKUPS, Side, audit_sides, logit_step
from sametoken.audit.verdict import IDENTICAL, NO_DRAFT, OTHER_MODEL
from sametoken.bench.acceptance import OTHER_DRAFTER, Profile
from sametoken.bench.scrape import Counters, parse_counters

TEXTS = {1: " a", 2: " b"}
ASK = AuditRequest("one", (5,), "prompt", 0.0, 0, 2)


def engine(margin: float) -> Side:
    """Names its candidates by id."""
    top = (((1, -1.0), (2, -3.0)), ((1, -1.0), (2, -1.0 - margin)))
    return Side("engine", lambda asks: {"one": Answer((1, 1), top=top)}, text_of=TEXTS.__getitem__)


def server(tokens: tuple[int | str, ...]) -> Side:
    """Its kernels are 1/64 off the engine's, and it prefers the other token at the end."""
    top = (((" a", -1.0), (" b", -3.015625)), ((" b", -1.0), (" a", -1.01)))
    return Side("server", lambda asks: {"one": Answer(tokens, top=top)})


def verdict_of(before: Counters | None, after: Counters | None):
    """The verdict on a server that answers as its baseline does."""
    read = iter((before, after))
    answers = {"one": Answer((1,), top=(((1, -1.0),),))}
    subject = Side("server", lambda asks: answers, lambda: next(read))
    return audit_sides(subject, Side("plain", lambda asks: answers), [ASK])


def acceptance(prefix: str, **counters: int):
    """What is found of a server whose counters are 0 before it is asked."""
    lines = (f"{prefix}:spec_decode_num_{name}_total {n}\n" for name, n in counters.items())
    text = re.sub(r"_at_(\d)_total", r'_per_pos_total{position="\1"}', "".join(lines))
    return verdict_of(Counters(), parse_counters(text)).diagnosis


def drafted(count: int) -> Counters:
    return parse_counters(f"vllm:spec_decode_num_draft_tokens_total {count}\n")


@pytest.mark.parametrize(
    ("before", "after", "num_drafts", "summary"),
    [
        (drafted(7), drafted(7), 0, NO_DRAFT),
        (drafted(7), drafted(9), 2, IDENTICAL),
        (drafted(7), drafted(2), None, IDENTICAL),
        (Counters(), Counters(), None, IDENTICAL),
        (drafted(7), None, None, IDENTICAL),
    ],
)
def test_a_server_s_drafts_are_counted_or_unknown(before, after, num_drafts, summary):
    verdict = verdict_of(before, after)
    assert (verdict.num_drafts, verdict.summary) == (num_drafts, summary)
    # Of each of the two runs one.
    assert verdict.num_tokens == 2


def test_steps_without_drafts_are_no_refused_drafts():
    """Of 200 steps 60 had a draft, 40 of them a second one."""
    found = acceptance(
        "sametoken",
        steps=200,
        drafts=60,
        draft_tokens=100,
        draft_tokens_at_0=60,
        draft_tokens_at_1=40,
        accepted_tokens_at_0=30,
        accepted_tokens_at_1=15,
    )
    assert found.profiles["running"] == Profile((60, 30), (30, 15))
    assert found.findings == ()


def test_a_server_s_drafts_may_be_looked_up():
    found = acceptance("vllm", drafts=60, draft_tokens=60, accepted_tokens_at_0=1)
    assert found.profiles["running"] == Profile((60,), (1,))
    assert [one.cause for one in found.findings] == [OTHER_DRAFTER]
    assert found.findings[0].remedy.endswith(OF_LOOKUPS)


@pytest.mark.parametrize("tokens", [(1, 2), (" a", " b")])
@pytest.mark.parametrize(("margin", "kind"), [(0.0625, TIE), (0.0635, CORRUPTION)])
def test_noise_against_an_engine_is_measured(tokens, margin, kind):
    """Four times the largest difference after the prompt, 4/64, is what a tie may span."""
    verdict = audit_sides(server(tokens), engine(margin), [ASK])
    assert verdict.noise == 0.0625
    (divergence,) = verdict.comparisons[0].divergences
    assert (divergence.position, divergence.found, divergence.kind) == (1, tokens[1], kind)


@pytest.mark.parametrize("subject_has_ids", [False, True])
def test_servers_of_which_one_returns_ids_are_compared_by_texts(subject_has_ids):
    texts = (" a", " b")
    with_ids = Side("new", lambda asks: {"one": Answer((1, 2), texts=texts)})
    without = Side("old", lambda asks: {"one": Answer(texts, texts=texts)})
    sides = (with_ids, without) if subject_has_ids else (without, with_ids)
    assert audit_sides(*sides, [ASK]).identical


def test_a_text_of_two_candidates_is_no_noise():
    """Parts of a character are one text; as noise their gap made a tie of any small margin."""
    part = "\ufffd"
    texts = {1: part, 2: part, 3: " a"}
    top = (((1, -1.0), (2, -3.0)), ((1, -1.0), (3, -1.1)))
    baseline = Side("engine", lambda asks: {"one": Answer((1, 1), top=top)}, text_of=texts.get)
    shown = (((part, -1.0),), ((part, -1.0), (" a", -1.1)))
    subject = Side("server", lambda asks: {"one": Answer((1, 3), top=shown)})
    verdict = audit_sides(subject, baseline, [ASK])
    assert verdict.noise == 0.0
    assert [one.kind for one in verdict.comparisons[0].divergences] == [CORRUPTION]


def rounding(tokens: tuple[int, ...], step: float, last: float) -> Side:
    """Repeats itself to the bit; its gaps are whole steps, except every fifth; then ``last``."""
    gaps = [step * (1 + i % 7) + (step / 3 if i % 5 == 0 else 0) for i in range(40)]
    top = tuple(((1, -1.0), (2, -1.0 - gap)) for gap in (*gaps, last))
    return Side("server", lambda asks: {"one": Answer(tokens, top=top)})


@pytest.mark.parametrize(
    ("step", "margin", "kind"),
    [(0.125, 0.125, TIE), (0.125, 0.25, CORRUPTION), (0.0625, 0.125, CORRUPTION)],
)
def test_logits_one_step_of_their_rounding_apart_are_a_tie(step, margin, kind):
    same = (1,) * 40
    baseline, subject = rounding((*same, 1), step, margin), rounding((*same, 2), step, margin)
    verdict = audit_sides(subject, baseline, [ASK])
    assert logit_step(baseline.answer([ASK])) == pytest.approx(step, rel=0.02)
    (divergence,) = verdict.comparisons[0].divergences
    assert (divergence.position, divergence.kind) == (40, kind)


def test_logits_that_are_not_rounded_have_no_step():
    top = tuple(((1, -1.0), (2, -1.0 - i * 0.0137)) for i in range(1, 60))
    assert logit_step({"one": Answer((1,) * 59, top=top)}) == 0.0
    few = tuple(((1, -1.0), (2, -1.5)) for _ in range(10))
    assert logit_step({"one": Answer((1,) * 10, top=few)}) == 0.0


@pytest.mark.parametrize(
    ("runs", "is_another"),
    [
        (((" a", -1.0), (" a", -1.0)), False),
        (((" a", -1.3), (" a", -1.3)), True),
        (((" c", -1.0), (" c", -1.0)), True),
        (((" a", -1.3), (" a", -1.0)), False),
    ],
)
def test_first_tokens_tell_another_model(runs, is_another):
    """No draft can change them, so what repeats there is no corruption."""
    answers = iter({"one": Answer((1, 2), top=((first,), (("x", 0.0),)))} for first in runs)
    subject = Side("server", lambda asks: next(answers))
    verdict = audit_sides(subject, engine(2.0), [ASK])
    assert (verdict.summary == OTHER_MODEL) == verdict.is_of_another_model == is_another

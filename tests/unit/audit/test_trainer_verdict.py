"""What an audit of a trainer says, from findings that are made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sametoken.audit.trainer_fit import (
    BOTH,
    EQUAL,
    STALE,
    TEMPERATURE,
    TIES,
    TOKENS,
    UNEXPLAINED,
    Fit,
)
from sametoken.audit.trainer_verdict import (
    Group,
    RolloutFinding,
    TokenDifference,
    TrainerVerdict,
    WrongToken,
)

GIVEN = Fit("as given, with m", "", 9, 7, 2, -0.25, 0.5, 1.5)
BEST = Fit("with the weights of older", STALE, 9, 9, 0, 0.0, 0.0, 0.0)


def group(cause: str = STALE, version: int | None = 3) -> Group:
    largest = (TokenDifference("4", 6, 17, "ab", -1.25, -0.75),)
    return Group(version, 0.7, 2, cause, BEST, GIVEN, (BEST,), largest)


def wrong(expected, found) -> WrongToken:
    return WrongToken.of("4", tuple(expected), tuple(found), lambda token: f"<{token}>")


@pytest.mark.parametrize(
    ("expected", "found", "place", "how", "said"),
    [
        ((1, 2, 3), (2, 3), 0, "lacks", "'<1>' is missing"),
        ((1, 2, 3), (1, 2), 2, "lacks", "'<3>' is missing"),
        ((2, 3), (1, 2, 3), 0, "has one more", "'<1>' is one too many"),
        ((1, 2), (1, 2, 2), 2, "has one more", "'<2>' is one too many"),
        ((1, 2, 3), (1, 9, 3), 1, "another one", "'<9>' in place of '<2>'"),
        ((1, 2, 3, 4), (1, 2), 2, "another one", "the end in place of '<3>'"),
        ((1,), (1, 2, 3), 1, "another one", "'<2>' in place of the end"),
    ],
)
def test_a_prompt_differs_first_at_one_token(expected, found, place, how, said):
    one = wrong(expected, found)
    assert (one.position, one.how) == (place, how)
    _, line, *_ = TrainerVerdict("m", (group(),), (one,)).lines()
    assert line == f"  rollout 4, token {place} of the prompt: {said}"


@pytest.mark.parametrize(
    ("causes", "tokens", "summary"),
    [
        ((EQUAL, EQUAL), (), EQUAL),
        ((EQUAL, TIES), (), TIES),
        ((TEMPERATURE, TIES), (), TEMPERATURE),
        ((STALE, TEMPERATURE), (), STALE),
        ((STALE, BOTH), (), BOTH),
        ((STALE, UNEXPLAINED), (), UNEXPLAINED),
        ((EQUAL,), (wrong((1, 2), (2,)),), TOKENS),
        ((UNEXPLAINED,), (wrong((1, 2), (2,)),), TOKENS),
    ],
)
def test_the_most_serious_cause_is_the_summary(causes, tokens, summary):
    verdict = TrainerVerdict("m", tuple(map(group, causes)), tokens)
    assert verdict.summary == summary
    assert verdict.identical == (summary == EQUAL)
    assert json.loads(json.dumps(verdict.as_json()))["summary"] == summary


def test_lines_show_every_assumption_and_the_largest_differences():
    assert list(TrainerVerdict("m", (group(),), num_cut=5).lines()) == [
        "the trainer against m: stale weights",
        "  2 rollouts, weight version 3, temperature 0.7: stale weights",
        "    as given, with m: 7 of 9 equal, difference 0.5 in the mean and 1.5 at most, mean of "
        "trainer less engine -0.25",
        "    with the weights of older (best): all 9 log-probabilities equal",
        "    rollout 4, token 6 of the answer ('ab'): -1.25, the engine -0.75",
        "  5 tokens beyond max_model_len were not compared",
        "  give engine and trainer the same weights before the next rollout",
    ]


def test_causes_that_differ_are_counted_by_rollout():
    causes = (STALE, EQUAL, STALE)
    each = tuple(RolloutFinding(str(i), cause, GIVEN, None) for i, cause in enumerate(causes))
    (line,) = (
        line
        for line in TrainerVerdict("m", (replace(group(), rollouts=each),)).lines()
        if "by rollout" in line
    )
    assert line == "    by rollout: 2 stale weights, 1 equal"


def test_many_wrong_prompts_are_counted():
    lines = list(TrainerVerdict("m", (group(EQUAL),), (wrong((1,), (2,)),) * 12).lines())
    assert sum("of the prompt" in line for line in lines) == 10
    assert "  and 2 more prompts" in lines

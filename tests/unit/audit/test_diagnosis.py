"""Causes told apart from profiles and replays that are made up."""

from __future__ import annotations

import pytest

from sametoken.audit.diagnosis import (
    BATCH_DECAY,
    CONTEXT_DECAY,
    STALE_LENGTHS,
    TEMPERATURE,
    TEMPLATE,
    Replay,
    diagnose,
)
from sametoken.bench.acceptance import BEYOND_FIRST, OTHER_DRAFTER, Profile


def profile(first: float, later: float, count: int = 1000) -> Profile:
    """Windows of three drafts with these acceptances of the first and of each later one."""
    one, two = round(count * first), round(count * first * later)
    return Profile((count, one, two), (one, two, round(two * later)))


GOOD = profile(0.8, 0.75)
LEVEL = tuple(Replay(context, 2, 2) for context in range(10, 110))


def causes(replays=LEVEL, *, trained=True, **profiles) -> list[str]:
    measured = {"running": GOOD} | {name.replace("_", " "): p for name, p in profiles.items()}
    return [finding.cause for finding in diagnose(measured, replays, trained=trained).findings]


def test_good_acceptance_has_no_cause():
    assert causes(alone=GOOD, one_draft=GOOD, greedy=GOOD, templated=GOOD) == []


@pytest.mark.parametrize(
    ("profiles", "cause"),
    [
        ({"running": profile(0.01, 0.0)}, OTHER_DRAFTER),
        ({"running": profile(0.8, 0.2)}, BEYOND_FIRST),
        ({"running": profile(0.6, 0.35), "one_draft": profile(0.8, 0.0)}, BEYOND_FIRST),
        ({"alone": profile(0.97, 0.9)}, BATCH_DECAY),
        ({"greedy": profile(0.97, 0.9)}, TEMPERATURE),
        ({"templated": profile(0.97, 0.9)}, TEMPLATE),
    ],
)
def test_each_cause_has_its_condition(profiles, cause):
    assert causes(**profiles) == [cause]


def test_few_drafts_say_nothing():
    assert causes(running=profile(0.0, 0.0, count=20)) == []


def test_copied_drafts_may_be_wrong():
    assert causes(running=profile(0.01, 0.0), trained=False) == []


def test_windows_behind_fresh_ones():
    late = [*LEVEL[:90], *(Replay(200, 1, 3) for _ in range(10))]
    assert causes(late) == [BEYOND_FIRST]
    wrong_from_the_first = [*LEVEL[:90], *(Replay(200, 0, 3) for _ in range(10))]
    assert causes(wrong_from_the_first) == [STALE_LENGTHS]
    chance = [*LEVEL[:99], Replay(200, 0, 3)]
    assert causes(chance) == []


def test_acceptance_that_falls_with_the_context():
    falling = [
        Replay(context, int(context < 500), int(context < 500)) for context in range(0, 1000, 10)
    ]
    assert causes(falling) == [CONTEXT_DECAY]


def test_evidence_and_remedy_are_given():
    (finding,) = diagnose({"running": profile(0.01, 0.0)}, (), trained=True).findings
    assert "1.0%" in finding.evidence
    assert "for this target" in finding.remedy

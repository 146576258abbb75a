"""What profiles of acceptance say."""

from __future__ import annotations

import pytest

from sametoken.bench.acceptance import (
    BEYOND_FIRST,
    OTHER_DRAFTER,
    Profile,
    one_line,
    profile_findings,
)
from sametoken.types.outputs import SpeculationMetrics

metrics_of = SpeculationMetrics.of
WINDOWS = [(3, 3), (3, 0), (3, 1), (3, 2)]


def test_conditional_acceptance():
    profile = Profile.of_windows(WINDOWS)
    assert profile.judged == (4, 3, 2)
    assert profile.accepted == (3, 2, 1)
    assert profile.conditional == (0.75, 2 / 3, 0.5)
    assert profile.first == 0.75
    assert profile.later == 3 / 5
    assert Profile.of_metrics(metrics_of(WINDOWS)) == profile
    assert Profile.of_windows([]).first == 0


@pytest.mark.parametrize(
    ("windows", "causes"),
    [
        ([(3, 2)] * 100, []),
        ([(3, 0)] * 99 + [(3, 1)], [OTHER_DRAFTER]),
        ([(3, 1)] * 80 + [(3, 0)] * 20, [BEYOND_FIRST]),
        ([(3, 0)] * 10, []),
        ([(1, 1)] * 100, []),
    ],
)
def test_findings(windows, causes):
    profile = Profile.of_windows(windows)
    assert [f.cause for f in profile_findings(profile, trained=True)] == causes
    assert profile_findings(profile, trained=False) == ()


def test_one_line():
    assert one_line(SpeculationMetrics(), trained=True) == "no drafts were offered"
    assert one_line(metrics_of([(3, 2)] * 100), trained=True).startswith("3.00 tokens per step")
    assert OTHER_DRAFTER in one_line(metrics_of([(3, 0)] * 100), trained=True)

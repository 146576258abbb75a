"""Bounds of a server are checked when they are given."""

from __future__ import annotations

import dataclasses

import pytest

from sametoken.errors import ConfigError
from sametoken.serving.limits import ServingLimits


def test_every_option_has_a_help_text():
    for field in dataclasses.fields(ServingLimits):
        assert field.metadata["help"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_waiting", -1),
        ("max_waiting", 1.5),
        ("max_waiting_tokens", True),
        ("max_restarts", -1),
        ("shadow_audit_rate", 1.1),
        ("shadow_audit_rate", float("nan")),
        ("restart_window_s", -1.0),
        ("restart_backoff_s", float("nan")),
        ("step_timeout_s", -1.0),
    ],
)
def test_impossible_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}="):
        ServingLimits(**{name: value})


def test_the_edges_are_possible():
    ServingLimits(0, 0, 1.0, 0, 0.0, 0.0, 0.0)

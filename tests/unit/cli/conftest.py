from __future__ import annotations

import pytest

from sametoken.serving.http import run


@pytest.fixture
def started(monkeypatch) -> list:
    """What ``serve`` would have run, without running it."""
    calls: list = []
    monkeypatch.setattr(run, "run", lambda *given: bool(calls.append(given)))
    return calls

from __future__ import annotations

import sys

from sametoken.io.terminal import stderr_is_terminal


def test_a_process_may_be_without_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert not stderr_is_terminal()

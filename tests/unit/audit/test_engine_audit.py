"""Audits of an engine that gives no logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sametoken.audit.asks import AuditRequest
from sametoken.audit.engine_audit import AuditSettings, audit_engine
from sametoken.config import EngineConfig
from sametoken.errors import NumericalError
from sametoken.types.request import RequestUpdate


class NaNCore:
    """Every request fails at its first token."""

    has_unfinished = False
    resolved = SimpleNamespace(model=SimpleNamespace(eos_token_ids=()))

    def __init__(self) -> None:
        self.running: list[str] = []

    def add_request(self, request) -> None:
        self.running.append(request.request_id)

    def step(self) -> list[RequestUpdate]:
        return [RequestUpdate(name, (), 0, 0, True, 0, failed=True) for name in self.running]

    def release(self, name: str) -> None:
        self.running.remove(name)


def test_two_equal_failures_are_no_proof():
    config = EngineConfig.from_options(model="m", speculative_config="ngram")
    asks = [AuditRequest("one", (5,), "", 0.0, 0, 2)]
    with pytest.raises(NumericalError, match="without speculation the model gives NaN for prompt"):
        audit_engine(config, asks, AuditSettings(), build=lambda config: NaNCore())

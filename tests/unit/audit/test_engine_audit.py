"""Audits of an engine that gives no logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.nan_core import NaNCore
from sametoken.audit.asks import AuditRequest
from sametoken.audit.engine_audit import AuditSettings, audit_engine
from sametoken.cli import audit
from sametoken.config import EngineConfig
from sametoken.engine import build
from sametoken.errors import NumericalError

ASKS = [AuditRequest("one", (5,), "", 0.0, 0, 2)]
WHY = "without speculation the model gives NaN for prompt 'one'"


def test_two_equal_failures_are_no_proof():
    config = EngineConfig.from_options(model="m", speculative_config="ngram")
    with pytest.raises(NumericalError, match=WHY):
        audit_engine(config, ASKS, AuditSettings(), build=lambda config: NaNCore())


def test_a_baseline_without_logits_is_none(monkeypatch):
    monkeypatch.setattr(build, "build_requested", lambda *given: NaNCore())
    tokenizer = SimpleNamespace(eos_token_id=None, decode_token=str)
    requested = SimpleNamespace(path="m", max_model_len=9)
    side = audit._engine_side(requested, ASKS, tokenizer, 1)
    with pytest.raises(NumericalError, match=WHY):
        side.answer(ASKS)

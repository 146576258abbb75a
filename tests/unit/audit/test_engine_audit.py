"""Audits of an engine that gives no logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.nan_core import NaNCore
from sametoken.audit import diagnosis
from sametoken.audit.asks import Answer, AuditRequest
from sametoken.audit.engine_audit import AuditSettings, audit_engine
from sametoken.bench.measure import Window
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


@pytest.mark.parametrize(("expand_from", "longest"), [(0, 11), (8, 7)])
def test_windows_are_drafted_afresh_where_the_text_has_their_bits_as_a_prompt(
    expand_from, longest, monkeypatch
):
    asked = []

    def run(core, requests, *settings):
        asked.extend(len(one.prompt_token_ids) for one in requests)
        return {one.name: Answer((), (Window(1, 2, 2),)) for one in requests}

    monkeypatch.setattr(diagnosis, "run_requests", run)
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    config = EngineConfig(speculative_config=speculation, fast_prompts_from=expand_from)
    core = SimpleNamespace(resolved=SimpleNamespace(config=config))
    ask = AuditRequest("one", (5, 5), "", 0.0, 0, 20)
    answer = Answer((5,) * 13, tuple(Window(first, 2, 2) for first in (1, 4, 6, 7, 10)))
    assert len(diagnosis.replay(core, [ask], {"one": answer})) == len(asked)
    assert max(asked) == longest

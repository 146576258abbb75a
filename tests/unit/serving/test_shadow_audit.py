"""Replays run one at a time, give way, and are held against what was served."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from sametoken.engine.input_processor import ProcessedRequest
from sametoken.engine.user_inputs import PromptTokens
from sametoken.serving.shadow_audit import ShadowAudit, is_chosen
from sametoken.serving.stats import AuditDifference
from sametoken.text.stop_strings import StopStrings
from sametoken.types.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sametoken.types.request import EngineRequest, RequestUpdate
from sametoken.types.sampling_params import SamplingParams

PROMPT = (3, 1, 4)


def finish(audit, *completions, request_id="r", reason="length", adapter=None, number=1):
    """A request that was served these tokens."""
    params = SamplingParams(seed=5, logprobs=1, max_tokens=40)
    requests = tuple(
        EngineRequest(f"{request_id}.{i}", PROMPT, params, 43, lora_name=adapter)
        for i in range(len(completions))
    )
    outputs = tuple(
        CompletionOutput(i, "", tuple(tokens), reason) for i, tokens in enumerate(completions)
    )
    prompt = PromptTokens(None, PROMPT)
    audit.note_finished(
        ProcessedRequest(request_id, prompt, params, requests, StopStrings(())),
        RequestOutput(request_id, None, PROMPT, outputs, True, RequestMetrics(0.0)),
        number,
    )


def said(replay, *token_ids, failed=False):
    update = RequestUpdate(replay.request_id, token_ids, 0, 0, True, 0, failed=failed)
    return (RequestUpdate("other", (9,), 0, 0, True, 0), update)


def test_a_replay_is_plain_uncached_and_as_long_as_what_was_served():
    audit = ShadowAudit(1.0)
    finish(audit, (7, 8))
    replay = audit.begin()
    assert (replay.num_speculative_tokens, replay.use_prefix_cache) == (0, False)
    assert replay.max_total_tokens == len(PROMPT) + 2
    assert (replay.params.seed, replay.params.logprobs) == (5, None)
    assert audit.begin() is None


def test_equal_tokens_are_counted_as_audited():
    audit = ShadowAudit(1.0)
    finish(audit, (7, 8, 9), (1, 2))
    assert audit.stats.num_pending == 2
    replay = audit.begin()
    assert audit.take(said(replay, 7, 8)) is None
    assert audit.take(said(replay, 9)) == replay.request_id
    replay = audit.begin()
    assert audit.take(said(replay, 1, 2)) == replay.request_id
    stats = audit.stats
    assert (stats.num_audited, stats.num_mismatched, stats.num_pending) == (2, 0, 0)


@pytest.mark.parametrize(
    ("news", "difference"),
    [
        ({"token_ids": (7, 5)}, AuditDifference("r.0", 1, 8, 5)),
        ({"token_ids": (7,), "failed": True}, AuditDifference("r.0", 1, 8, None)),
        ({"token_ids": (7, 8, 6)}, AuditDifference("r.0", 2, 9, 6)),
    ],
)
def test_the_first_difference_is_kept_and_logged(news, difference, caplog):
    audit = ShadowAudit(1.0)
    finish(audit, (7, 8, 9))
    replay = audit.begin()
    tokens = news.pop("token_ids")
    with caplog.at_level(logging.ERROR, "sametoken"):
        assert audit.take(said(replay, *tokens, **news)) == replay.request_id
    assert audit.stats.last_difference == difference
    assert (audit.stats.num_audited, audit.stats.num_mismatched) == (1, 1)
    assert f"differs at output token {difference.position}" in caplog.text


def test_a_replay_gives_way_and_comes_again_from_its_start():
    audit = ShadowAudit(1.0)
    finish(audit, (7, 8))
    replay = audit.begin()
    audit.take(said(replay, 7))
    assert audit.interrupt() == replay.request_id
    assert audit.interrupt() is None
    assert audit.take(said(replay, 8)) is None
    again = audit.begin()
    assert again == replace(replay, request_id=again.request_id)
    # Updates of the first time may still be on their way.
    assert again.request_id != replay.request_id
    assert audit.take(said(replay, 9)) is None
    assert audit.stats.num_mismatched == 0
    assert audit.take(said(again, 7, 8)) == again.request_id
    assert audit.stats.num_mismatched == 0


def test_an_abandoned_replay_does_not_come_again():
    audit = ShadowAudit(1.0)
    finish(audit, (7, 8))
    audit.begin()
    audit.abandon()
    assert audit.begin() is None
    assert audit.stats.num_dropped == 1


def test_a_request_is_replayed_by_the_adapter_that_served_it_or_not_at_all():
    audit = ShadowAudit(1.0)
    finish(audit, (7,), adapter="sql", number=3)
    replay = audit.begin()
    # Another adapter came, and the engine had taken three requests.
    assert audit.change(3) == replay.request_id
    finish(audit, (7,), adapter="sql", number=3)
    assert audit.begin() is None
    finish(audit, (7,), number=3)
    finish(audit, (7,), adapter="sql", number=4)
    assert audit.stats.num_pending == 2
    # The next process has the adapter of the start.
    audit.restart(0)
    assert audit.stats.num_pending == 0
    finish(audit, (7,), adapter="sql", number=1)
    assert audit.begin() is not None


@pytest.mark.parametrize(("reason", "tokens"), [("abort", (7,)), ("error", (7,)), ("stop", ())])
def test_what_says_nothing_is_left_out(reason, tokens):
    audit = ShadowAudit(1.0)
    finish(audit, tokens, reason=reason)
    assert audit.begin() is None


def test_the_line_is_bounded_and_loses_the_oldest():
    audit = ShadowAudit(1.0)
    for i in range(300):
        finish(audit, (7,), request_id=f"r{i}")
    assert (audit.stats.num_pending, audit.stats.num_dropped) == (256, 44)
    assert audit.begin().request_id == "r44.0#replay#1"


def test_the_share_is_a_function_of_the_ids():
    ids = [f"request-{i}" for i in range(4000)]
    chosen = [name for name in ids if is_chosen(name, 0.1)]
    assert 300 < len(chosen) < 500
    assert chosen == [name for name in ids if is_chosen(name, 0.1)]
    assert not any(is_chosen(name, 0.0) for name in ids)
    assert all(is_chosen(name, 1.0) for name in ids)

"""Diagnosis of low acceptance: compare acceptance under several conditions.

The reference is a fresh drafter: the answer so far is sent as a prompt, so that the next drafts
come from a state built by one prefill. A drafter that reads correct lengths and metadata
proposes the same drafts while decoding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sametoken.audit.asks import Answers, AuditRequest
from sametoken.audit.engine_runs import RunSettings, run_requests
from sametoken.bench.acceptance import BEYOND_FIRST, MIN_DRAFTS, Finding, Profile, profile_findings
from sametoken.bench.measure import Window

if TYPE_CHECKING:
    from sametoken.engine.core import EngineCore

STALE_LENGTHS = "running drafts fall behind fresh ones"
CONTEXT_DECAY = "decay with context length"
BATCH_DECAY = "decay with batch"
TEMPLATE = "chat template mismatch"
TEMPERATURE = "sampling temperature"

#: A share of windows below this may be chance; without defects it is 0.
TOLERATED_SHARE = 0.02
NOTABLE_DROP = 0.15
MAX_REPLAYS = 48


@dataclass(frozen=True, slots=True)
class Replay:
    """One window of a running request, and the same window after a fresh prefill.

    Attributes:
        context: committed tokens before the window.
        running, fresh: accepted drafts; both windows offer the same number.
    """

    context: int
    running: int
    fresh: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The measurements and the causes found.

    Attributes:
        profiles: acceptance per position by condition, including "running".
        replays: windows drafted again.
        findings: causes, the most serious first; empty if there are none.
    """

    profiles: Mapping[str, Profile]
    replays: tuple[Replay, ...]
    findings: tuple[Finding, ...]


def profile_of(answers: Answers) -> Profile:
    """Count acceptance per position of a run; prefill steps offer no drafts."""
    return Profile.of_windows(
        (window.num_drafts, window.num_accepted)
        for answer in answers.values()
        for window in answer.windows
        if window.first
    )


def replay(
    core: EngineCore, requests: Sequence[AuditRequest], answers: Answers
) -> tuple[Replay, ...]:
    """Draft some windows of ``answers`` again after a fresh prefill, one request at a time.

    They are sampled uniformly, ``MAX_REPLAYS`` at most, of those whose text as a prompt has no
    fast form: an answer has the usual one, and other bits.

    Args:
        core: an idle engine with a drafter.
        requests: the requests of ``answers``.
        answers: answers of the same engine.
    """
    config = core.resolved.config
    k, longest = config.num_speculative_tokens, config.fast_prompts_from or math.inf
    candidates = [
        (request, window)
        for request in requests
        for window in answers[request.name].windows
        if window.first and window.num_drafts == k and window.first + k < request.max_tokens
        if len(request.prompt_token_ids) + window.first <= longest
    ]
    chosen = random.Random(0).sample(candidates, min(MAX_REPLAYS, len(candidates)))
    replays = []
    for request, window in chosen:
        fresh = _fresh_window(core, request, answers, window)
        if fresh is not None and fresh.num_drafts == window.num_drafts:
            context = len(request.prompt_token_ids) + window.first
            replays.append(Replay(context, window.num_accepted, fresh.num_accepted))
    return tuple(replays)


def _fresh_window(
    core: EngineCore, request: AuditRequest, answers: Answers, window: Window
) -> Window | None:
    # The prefill step emits the token before the window; the next step verifies the window.
    before = map(int, answers[request.name].tokens[: window.first - 1])
    prompt = (*request.prompt_token_ids, *before)
    room = window.num_drafts + 2
    again = replace(request, prompt_token_ids=prompt, max_tokens=room)
    answer = run_requests(core, [again], RunSettings(concurrency=1))[request.name]
    return next((w for w in answer.windows if w.first == 1), None)


def diagnose(
    profiles: Mapping[str, Profile], replays: Sequence[Replay], *, trained: bool
) -> Diagnosis:
    """Find the causes of low acceptance.

    Args:
        profiles: by condition: "running" as configured; and, if measured, "one draft" with
            k = 1, "alone" with one request at a time, "greedy" at temperature 0, "templated"
            with the chat template.
        replays: windows drafted again.
        trained: whether the drafter is a model.
    """
    running = profiles["running"]
    own = profile_findings(running, trained=trained)
    findings = [
        *own,
        *_against_one_draft(profiles, own, trained=trained),
        *_against_fresh(replays, own),
        *_by_context(replays),
        *_against(profiles, "alone", BATCH_DECAY, "one request at a time", "lower max_num_seqs"),
        *_against(
            profiles, "greedy", TEMPERATURE, "at temperature 0", "lower the temperature or k"
        ),
        *_against(
            profiles,
            "templated",
            TEMPLATE,
            "with the chat template",
            "send chat messages, or prompts in the model's own format",
        ),
    ]
    return Diagnosis(dict(profiles), tuple(replays), tuple(findings))


def _against_one_draft(
    profiles: Mapping[str, Profile], own: Sequence[Finding], *, trained: bool
) -> list[Finding]:
    """Compare with k = 1, where no later positions can suffer from stale metadata."""
    running, one = profiles["running"], profiles.get("one draft")
    known = any(finding.cause == BEYOND_FIRST for finding in own)
    if one is None or known or not trained or min(one.num_first, running.num_later) < MIN_DRAFTS:
        return []
    if running.later >= 0.5 * one.first or running.first < 0.5 * one.first:
        return []
    return [
        Finding(
            BEYOND_FIRST,
            f"with k=1 {one.first:.1%} of drafts are accepted, beyond position 1 "
            f"{running.later:.1%}",
            "suspect stale lengths or metadata: compare with enforce_eager",
        )
    ]


def _against_fresh(replays: Sequence[Replay], own: Sequence[Finding]) -> list[Finding]:
    behind = [one for one in replays if one.running < one.fresh]
    if not replays or len(behind) <= TOLERATED_SHARE * len(replays):
        return []
    at_first = sum(one.running == 0 for one in behind)
    evidence = (
        f"{len(behind)} of {len(replays)} windows accept fewer drafts than the same windows "
        f"drafted afresh, {at_first} of them at position 1"
    )
    if not at_first and not any(finding.cause == BEYOND_FIRST for finding in own):
        return [Finding(BEYOND_FIRST, evidence, "suspect stale lengths or metadata")]
    return [
        Finding(STALE_LENGTHS, evidence, "the drafter reads wrong tokens or lengths: report a bug")
    ]


def _by_context(replays: Sequence[Replay]) -> list[Finding]:
    ranked = sorted(replays, key=lambda one: one.context)
    half = len(ranked) // 2
    if half < MIN_DRAFTS // 2:
        return []
    short, long = ranked[:half], ranked[-half:]
    near, far = (sum(one.fresh > 0 for one in part) / half for part in (short, long))
    if near - far < NOTABLE_DROP or short[-1].context * 2 > long[-1].context:
        return []
    return [
        Finding(
            CONTEXT_DECAY,
            f"first drafts accepted: {near:.0%} up to {short[-1].context} tokens, {far:.0%} up to "
            f"{long[-1].context}",
            "use a drafter trained on long contexts, or fewer drafts there",
        )
    ]


def _against(
    profiles: Mapping[str, Profile], condition: str, cause: str, words: str, remedy: str
) -> list[Finding]:
    running, other = profiles["running"], profiles.get(condition)
    if other is None or min(running.num_first, other.num_first) < MIN_DRAFTS:
        return []
    if other.first - running.first < NOTABLE_DROP:
        return []
    evidence = f"first drafts accepted: {running.first:.0%}, but {other.first:.0%} {words}"
    return [Finding(cause, evidence, remedy)]

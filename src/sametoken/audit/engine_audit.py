"""Audit this engine: the same requests without and with speculation, in several batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sametoken.audit.asks import Answers, AuditRequest, num_tokens_of
from sametoken.audit.compare import (
    Comparison,
    TextDefect,
    compare,
    compare_logits,
    differences,
    text_defects,
)
from sametoken.audit.diagnosis import Diagnosis, diagnose, profile_of, replay
from sametoken.audit.engine_runs import RunSettings, num_drafts_of, run_plain, run_requests
from sametoken.audit.verdict import Verdict
from sametoken.bench.report import environment
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.errors import ConfigError, RequestError
from sametoken.models.hub import model_name
from sametoken.types.speculative_methods import LOOKUPS

Build = Callable[[EngineConfig], EngineCore]


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Options of an audit.

    Attributes:
        concurrency: maximum number of running requests.
        num_alone: number of requests that also run one at a time.
        diagnose: also measure why drafts are rejected.
        stop_token_ids: ids that end an answer in addition to the model's.
    """

    concurrency: int = 8
    num_alone: int = 8
    diagnose: bool = True
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Baseline:
    """Answers of plain decoding.

    Attributes:
        answers: at the audit's concurrency.
        top: a second run, with the best candidates of every position.
        noise: the largest difference of a log-probability between two batches.
        repeats: plain decoding against itself.
    """

    answers: Answers
    top: Answers
    noise: float
    repeats: tuple[Comparison, ...]


def audit_engine(
    config: EngineConfig,
    requests: Sequence[AuditRequest],
    settings: AuditSettings,
    *,
    templated: Sequence[AuditRequest] = (),
    announce: Callable[[str], None] = lambda text: None,
    build: Build = build_engine,
) -> Verdict:
    """Run every request without and with speculation, and compare.

    Args:
        config: with the speculation to audit.
        requests: the requests.
        settings: options of the audit.
        templated: the requests with the chat template, if ``requests`` lack it.
        announce: called with one line per phase.
        build: builds an engine.

    Raises:
        ConfigError: there is no speculation to audit, or it is synthetic.
        RequestError: a request is longer than the engine allows.
        NumericalError: plain decoding gives NaN.
        CheckpointError, UnsupportedError, DrafterMismatchError: as ``build_engine``.
    """
    speculative = require_speculation(config)
    announce("plain decoding")
    plain = build(replace(config, speculative_config=None))
    baseline = _baseline(plain, requests, settings)
    del plain
    gc.collect()
    announce(f"speculation by {speculative.label}")
    core = build(config)
    resolved = core.resolved.config
    runs = _runs(core, requests, settings)
    comparisons = _comparisons(core, requests, baseline, runs, settings)
    diagnosis = None
    if settings.diagnose:
        announce("drafting some windows again after a fresh prefill")
        diagnosis = _diagnosis(core, requests, runs, templated, settings)
    model = model_name(Path(config.model))
    drafting = (resolved.speculative_config or speculative).label
    return Verdict(
        subject=f"{model} with {drafting}, k={resolved.num_speculative_tokens}",
        baseline=f"{model}, plain",
        comparisons=comparisons,
        repeats=baseline.repeats,
        noise=baseline.noise,
        num_tokens=sum(map(num_tokens_of, runs.values())),
        num_drafts=sum(map(num_drafts_of, runs.values())),
        defects=_defects(baseline.answers, runs["as configured"]),
        diagnosis=diagnosis,
        environment=environment(core.resolved.device),
    )


def require_fitting(requests: Sequence[AuditRequest], longest: int) -> None:
    """Refuse requests of more than ``longest`` tokens, before an engine runs any.

    Raises:
        RequestError: a request is longer than the model's context, or ``max_model_len``.
    """
    for one in requests:
        prompt_len = len(one.prompt_token_ids)
        if prompt_len + one.max_tokens > longest:
            raise RequestError(
                f"prompt {one.name!r} has {prompt_len} tokens, which with {one.max_tokens} of an "
                f"answer are more than max_model_len={longest}",
                "lower max_tokens, leave the prompt out, or raise max_model_len",
            )


def require_speculation(config: EngineConfig) -> SpeculativeConfig:
    """The speculation to audit.

    Raises:
        ConfigError: there is none, or it is synthetic.
    """
    if config.speculative_config is None:
        raise ConfigError("there is no speculation to audit", "give --speculative-config")
    if config.synthetic:
        raise ConfigError(
            f"an audit of {' and '.join(config.synthetic)} is meaningless", "use real ones"
        )
    return config.speculative_config


def _comparisons(
    core: EngineCore,
    requests: Sequence[AuditRequest],
    baseline: Baseline,
    runs: dict[str, Answers],
    settings: AuditSettings,
) -> tuple[Comparison, ...]:
    """Each run against the baseline, and the logits of accepted rows."""
    top = run_requests(core, requests, replace(_usual(core, settings), top=True))
    tokens = (
        compare(name, baseline.answers, found, noise=baseline.noise, margins=baseline.top)
        for name, found in runs.items()
    )
    return (*tokens, compare_logits("logits of accepted rows", baseline.top, top))


def _runs(
    core: EngineCore, requests: Sequence[AuditRequest], settings: AuditSettings
) -> dict[str, Answers]:
    """Run the requests with speculation in several ways; answers by the run's name."""
    usual = _usual(core, settings)
    fewer, fewer_drafts = (
        max(1, most // 2)
        for most in (settings.concurrency, core.resolved.config.num_speculative_tokens)
    )
    variants = {
        "as configured": usual,
        f"shuffled, {fewer} at once": replace(usual, concurrency=fewer, shuffled=True),
        f"k={fewer_drafts}": replace(usual, max_drafts=fewer_drafts),
    }
    runs = {name: run_requests(core, requests, how) for name, how in variants.items()}
    alone = replace(usual, concurrency=1)
    runs["one at a time"] = run_requests(core, requests[: settings.num_alone], alone)
    return runs


def _baseline(
    core: EngineCore, requests: Sequence[AuditRequest], settings: AuditSettings
) -> Baseline:
    usual = _usual(core, settings)
    with_top = replace(usual, top=True)
    answers = run_plain(core, requests, usual)
    top = run_plain(core, requests, with_top)
    alone = run_plain(core, requests[: settings.num_alone], replace(with_top, concurrency=1))
    noise = max(differences(top, alone), default=0.0)
    repeats = (
        compare("plain, again", answers, top, noise=noise, margins=top),
        compare("plain, one at a time", answers, alone, noise=noise, margins=top),
    )
    return Baseline(answers, top, noise, repeats)


def _defects(baseline: Answers, found: Answers) -> tuple[TextDefect, ...]:
    return tuple(
        defect
        for name, answer in found.items()
        if answer.tokens != baseline[name].tokens
        for defect in text_defects(name, baseline[name], answer)
    )


def _diagnosis(
    core: EngineCore,
    requests: Sequence[AuditRequest],
    runs: dict[str, Answers],
    templated: Sequence[AuditRequest],
    settings: AuditSettings,
) -> Diagnosis:
    usual = _usual(core, settings)
    some = requests[: max(settings.num_alone, 4 * settings.concurrency)]
    profiles = {
        "running": profile_of(runs["as configured"]),
        "alone": profile_of(runs["one at a time"]),
        "one draft": profile_of(run_requests(core, some, replace(usual, max_drafts=1))),
    }
    if any(request.temperature for request in some):
        greedy = [replace(request, temperature=0.0) for request in some]
        profiles["greedy"] = profile_of(run_requests(core, greedy, usual))
    if templated:
        profiles["templated"] = profile_of(run_requests(core, templated, usual))
    replays = replay(core, requests, runs["as configured"])
    drafting = core.resolved.config.speculative_config
    trained = drafting is not None and drafting.method not in LOOKUPS
    return diagnose(profiles, replays, trained=trained)


def _usual(core: EngineCore, settings: AuditSettings) -> RunSettings:
    """A run as configured."""
    eos = frozenset((*core.resolved.model.eos_token_ids, *settings.stop_token_ids))
    return RunSettings(settings.concurrency, eos)

"""The audit names every bug class that this project exists to make impossible."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from helpers.harness import CPU, build
from helpers.hybrid_toy import HybridToy
from helpers.lookups import ngram_drafter
from helpers.static_steps import CHOICE
from helpers.twin import PROMPTS, Twin
from mutants.catalogue import lengths, recurrent, results
from regression.test_vllm_39273 import PROMPTS as HYBRID_PROMPTS
from regression.test_vllm_39273 import SHAPE, ThreeStepsThenNone
from regression.test_vllm_39273 import K as MANY
from sametoken.audit.asks import AuditRequest
from sametoken.audit.compare import CORRUPTION
from sametoken.audit.diagnosis import STALE_LENGTHS
from sametoken.audit.engine_audit import AuditSettings, audit_engine
from sametoken.audit.verdict import CORRUPTED, IDENTICAL
from sametoken.bench.acceptance import BEYOND_FIRST, OTHER_DRAFTER
from sametoken.config import EngineConfig
from sametoken.drafters.context import DraftContext
from sametoken.drafters.eagle import EagleDrafter
from sametoken.ops.dispatch import select_kernels

K = 4
CONFIG = EngineConfig.from_options(
    model="twin", speculative_config={"method": "mtp", "num_speculative_tokens": K}
)
SETTINGS = AuditSettings(concurrency=3, num_alone=2)


def asks_of(prompts, max_tokens: int) -> list[AuditRequest]:
    return [
        AuditRequest(f"{name}@{temperature}", tuple(prompt), "", temperature, seed, max_tokens)
        for temperature in (0.0, 0.8)
        for seed, (name, prompt) in enumerate(prompts.items())
    ]


MAX_TOKENS = 16
LONG_PROMPTS = {f"{i}": p for i, p in enumerate(PROMPTS) if len(p) > 4}
LONGEST_PROMPTS = {name: p for name, p in LONG_PROMPTS.items() if len(p) > 8}


def audited(core, k: int):
    """An engine of the bench with what an audit reads of its settings."""
    speculation = CONFIG.speculative_config
    core.resolved = SimpleNamespace(
        steps_in_flight=core.resolved.steps_in_flight,
        config=SimpleNamespace(
            num_speculative_tokens=k, speculative_config=speculation, fast_prompts_from=0
        ),
        model=SimpleNamespace(eos_token_ids=()),
        device=CPU,
    )
    return core


def audit_twin(
    directory,
    *,
    plant=lambda: None,
    steps_in_flight=1,
    spoil=True,
    prompts=LONG_PROMPTS,
    max_tokens=MAX_TOKENS,
):
    """Audit an engine; ``plant`` is called before the one with speculation is built."""
    twin = Twin(directory, kernels=select_kernels(CPU))

    def make(config):
        k = config.num_speculative_tokens
        spoilt = spoil and k > 0
        if k:
            plant()
        core = twin.engine(max(k, 1), steps_in_flight=steps_in_flight, spoil=spoilt)
        return audited(core, k)

    return audit_engine(CONFIG, asks_of(prompts, max_tokens), SETTINGS, build=make)


def causes(verdict) -> list[str]:
    return [finding.cause for finding in verdict.diagnosis.findings]


def stale_rows_in_the_chain(patch: pytest.MonkeyPatch) -> None:
    """The first chain step of as many requests serves all later ones, as a stale graph does."""
    advanced, kept = DraftContext.advanced, {}

    def mutant(self, chains):
        return kept.setdefault(len(chains.following), advanced(self, chains))

    patch.setattr(DraftContext, "advanced", mutant)


def another_models_drafts(patch: pytest.MonkeyPatch) -> None:
    original = EagleDrafter.propose

    def mutant(self, context):
        drafts = original(self, context)
        return dataclasses.replace(drafts, draft_ids=(drafts.draft_ids + 1) % 7)

    patch.setattr(EagleDrafter, "propose", mutant)


def test_the_clean_engine_passes(tmp_path, monkeypatch):
    monkeypatch.setenv(CHOICE, "static")
    verdict = audit_twin(tmp_path)
    assert verdict.summary == IDENTICAL
    assert causes(verdict) == []
    assert verdict.noise == 0.0
    assert verdict.diagnosis.profiles["running"].num_later > 50
    assert verdict.comparisons[-1].num_logits == MAX_TOKENS * 2 * len(LONG_PROMPTS)
    assert len(verdict.diagnosis.replays) > 20


@pytest.mark.parametrize(
    ("plant", "cause", "steps", "max_tokens"),
    [
        (lengths.newest_token_is_read_at_the_optimistic_length, STALE_LENGTHS, "static", 10),
        (lengths.end_counts_rejected_drafts, STALE_LENGTHS, "compact", 10),
        (lengths.lengths_are_trimmed_in_place, STALE_LENGTHS, "static", 10),
        # Enough that acceptance by position is told from chance.
        (stale_rows_in_the_chain, BEYOND_FIRST, "compact", 28),
        (another_models_drafts, OTHER_DRAFTER, "static", 16),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_drafter_bugs_are_named_although_no_token_changes(
    tmp_path, monkeypatch, plant, cause, steps, max_tokens
):
    monkeypatch.setenv(CHOICE, steps)
    late = plant is stale_rows_in_the_chain
    verdict = audit_twin(
        tmp_path,
        plant=lambda: plant(monkeypatch),
        spoil=not late,
        prompts=LONG_PROMPTS if late else LONGEST_PROMPTS,
        max_tokens=max_tokens,
    )
    assert verdict.summary == IDENTICAL
    assert cause in causes(verdict), verdict.diagnosis


def test_a_copy_read_in_flight_is_corruption(tmp_path, monkeypatch):
    verdict = audit_twin(
        tmp_path,
        plant=lambda: results.copy_is_read_in_flight_unchecked(monkeypatch),
        steps_in_flight=3,
    )
    assert verdict.summary == CORRUPTED


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(
    "plant",
    [recurrent.a_step_without_drafts_does_not_fold, recurrent.rejected_drafts_are_folded],
    ids=lambda plant: plant.__name__,
)
def test_recurrent_state_that_ran_ahead_is_corruption(monkeypatch, plant):
    plant(monkeypatch)
    model = HybridToy(pull=9.0)
    ngram = EngineConfig.from_options(
        model="hybrid", speculative_config={"method": "ngram", "num_speculative_tokens": MANY}
    )

    def make(config):
        if not config.num_speculative_tokens:
            return audited(build(model, SHAPE), 0)
        drafter = ngram_drafter(MANY, 2, 10, kind=ThreeStepsThenNone)
        return audited(build(model, SHAPE, make_drafter=lambda parts: drafter), MANY)

    settings = AuditSettings(concurrency=2, num_alone=1, diagnose=False)
    verdict = audit_engine(ngram, asks_of(HYBRID_PROMPTS, 12), settings, build=make)
    assert verdict.summary == CORRUPTED
    divergences = [d for comparison in verdict.comparisons for d in comparison.divergences]
    assert CORRUPTION in {d.kind for d in divergences}
    assert all(d.window is not None for d in divergences)

"""Engines built from hybrid checkpoints: the same tokens with drafts and without."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.utils import logging as transformers_logging

from helpers.harness import requests_of, run
from helpers.hybrids import EXPERTS, FULL, LINEAR, TINY
from helpers.static_steps import in_steps
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.ops.dispatch import CHOICE

transformers_logging.disable_progress_bar()
SIZES = TINY | {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
# Repetitive, so that n-grams are found.
PROMPTS = [[3, 1, 4] * 7, [9, 2, 6, 5, 3, 5, 8], list(range(40)), [7, 7]]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def checkpoint(request, tmp_path_factory):
    torch.manual_seed(0)
    if request.param == "qwen3_5":
        config = Qwen3_5TextConfig(**SIZES)
    else:
        config = Qwen3NextConfig(**SIZES, **EXPERTS)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def build(path, announce=lambda text: None, **options):
    options = {
        "model": str(path),
        "max_num_seqs": 3,
        "prefill_chunk_size": 16,
        "block_size": 8,
        "max_model_len": 96,
    } | options
    return build_engine(EngineConfig.from_options(**options), announce)


requests = partial(requests_of, PROMPTS, 10)


def speculative(method: str, k: int, **settings) -> dict:
    return {"method": method, "num_speculative_tokens": k, **settings}


@pytest.mark.parametrize(
    ("temperature", "dtype", "kernels"),
    [(0.0, "float32", "native"), (0.8, "bfloat16", "native"), (0.8, "float32", "reference")],
)
def test_no_drafter_changes_a_token(checkpoint, temperature, dtype, kernels, monkeypatch):
    monkeypatch.setenv(CHOICE, kernels)
    plain = run(build(checkpoint, dtype=dtype), requests(temperature))
    ngram = speculative("ngram", 12, prompt_lookup_min=1, prompt_lookup_max=3)
    draft_model = speculative("draft_model", 3, model=str(checkpoint))
    for config, steps in ((ngram, "compact"), (ngram, "static"), (draft_model, "static")):
        core = build(checkpoint, dtype=dtype, speculative_config=config)
        core._runner = in_steps(core._runner, steps)
        drafted = run(core, requests(temperature))
        assert drafted.tokens == plain.tokens
        assert drafted.offered > 0
    assert drafted.accepted == drafted.offered, "the target as its own draft model is right"


def test_it_counts_its_memory_and_that_of_kept_states(checkpoint):
    core = build(checkpoint, speculative_config=speculative("ngram", 5))
    resolved, runner = core.resolved, core._runner
    cache, (states,) = runner.step.kv, runner.kept_states.caches
    assert resolved.config.enable_prefix_caching
    assert resolved.recurrent_bytes == sum(memory.nbytes for memory in cache.slots)
    assert resolved.kept_states_bytes == sum(memory.nbytes for memory in states.kept)
    assert resolved.num_kept_states == core.scheduler.limits.num_kept_states == 8 * 3
    assert cache.folded.max_pending == 5
    assert {len(memory) for memory in cache.blocks} == {SIZES["layer_types"].count(FULL)}


def test_it_says_where_no_state_fits_that_prefix_caching_is_off(checkpoint):
    told = []
    core = build(checkpoint, told.append, kept_states_memory_bytes=1)
    assert not core.resolved.config.enable_prefix_caching
    assert core.resolved.num_kept_states == core.resolved.kept_states_bytes == 0
    assert any("enable_prefix_caching is off" in text for text in told)

"""The command of vllm#39273: steps as long as the context, n-gram drafts with k = 64, a hybrid."""

from __future__ import annotations

import pytest
import torch

from helpers.calculator import NGRAM
from helpers.checkpoints import VOCAB
from helpers.harness import request, run
from helpers.hybrids import write_hybrid
from helpers.recorded import RecordedLogits
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.layers import slices

CONTEXT = 131_072


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("target"), max_position_embeddings=CONTEXT)


def answer(target, prompt, **options):
    config = {"model": str(target), "device": "cpu", "max_num_seqs": 2, "max_model_len": CONTEXT}
    core = build_engine(EngineConfig.from_options(**config | options))
    recorded = RecordedLogits()
    core._runner = recorded.runner(core._runner)
    item = request("a", prompt, max_tokens=48)
    ran = run(core, [item])
    return core, ran, recorded.rows


def test_a_prompt_in_one_step_is_answered_as_in_small_ones(target, monkeypatch):
    monkeypatch.setattr(slices, "SLICE_ROWS", 1024)
    pattern = [(i * i + 3 * i) % VOCAB for i in range(40)]
    prompt = [*(i * 7 % VOCAB for i in range(4000)), *pattern * 10]
    _, plain, expected = answer(target, prompt, max_num_batched_tokens=512)
    core, ran, rows = answer(
        target, prompt, max_num_batched_tokens=CONTEXT, speculative_config=NGRAM
    )
    assert core.resolved.max_model_len == core.scheduler.limits.max_num_batched_tokens == CONTEXT
    assert ran.tokens == plain.tokens
    assert ran.offered
    assert all(torch.equal(rows[key], row) for key, row in expected.items())

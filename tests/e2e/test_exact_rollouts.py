"""A trainer's log-probabilities are the rollout's, to the bit; no drafter changes its weights."""

from __future__ import annotations

import dataclasses
from itertools import cycle
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_checkpoint
from helpers.exact import CONFIGS, all_equal, rollout, write_exact
from helpers.hybrids import EXPERTS, merged_experts, twin_config, twin_tensors
from helpers.scripts import imported
from helpers.updates import NGRAM, PROMPTS, engine, params
from sametoken import LLM, SamplingParams
from sametoken.exact import ExactModel

SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints by family, written when they are asked for."""
    folder = tmp_path_factory.mktemp("exact")

    def of(name: str) -> Path:
        path = folder / name
        return path if path.exists() else write_exact(path, name)

    return of


def itself(path: Path) -> dict:
    """A drafter whose drafts are accepted: the target."""
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": 2}


@pytest.mark.parametrize(("name", "dtype"), zip(CONFIGS, cycle(("bfloat16", "float32"))))
def test_log_probabilities_are_those_of_every_rollout(name, dtype, checkpoints):
    model = ExactModel(str(checkpoints(name)), dtype=dtype, device="cpu", max_model_len=60)
    texts = []
    for spec in (None, itself(checkpoints(name))):
        llm = engine(checkpoints(name), spec, dtype=dtype)
        sequences, starts, logprobs = rollout(llm, PROMPTS, params(12, logprobs=0))
        assert all_equal(model(sequences, starts), logprobs)
        texts.append(sequences)
    assert texts[0] == texts[1]
    assert llm.speculation_metrics.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("name", "kernels", "spec"),
    [
        ("llama", "native", NGRAM),
        ("qwen3", "native", SUFFIX),
        ("llama", "reference", SUFFIX),
        ("qwen3_5", "native", NGRAM),
    ],
)
def test_any_drafter_batch_and_kernels(name, kernels, spec, checkpoints, monkeypatch):
    """Greedy and sampled, several answers each, prompts in chunks; scored together and alone."""
    monkeypatch.setenv("SAMETOKEN_KERNELS", kernels)
    model = ExactModel(str(checkpoints(name)), dtype="bfloat16", device="cpu", max_model_len=60)
    llm = engine(checkpoints(name), spec, dtype="bfloat16", max_num_batched_tokens=8)
    for changes in ({"temperature": 0.0, "max_tokens": 24}, {"temperature": 1.0, "n": 2}):
        sampling = params(**{"logprobs": 0} | changes)
        sequences, starts, logprobs = rollout(llm, PROMPTS, sampling)
        assert all_equal(model(sequences, starts), logprobs)
        alone = (model([ids], [at])[0] for ids, at in zip(sequences, starts, strict=True))
        assert all_equal(alone, logprobs)
    assert llm.speculation_metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "with experts"])
def test_a_hybrid_with_its_own_module(experts, tmp_path):
    """As published: names of a model that also sees, and a module that the trainer leaves out."""
    config = twin_config(**experts)
    path = write_checkpoint(tmp_path, config, merged_experts(twin_tensors(config)))
    llm = engine(path, {"method": "mtp", "num_speculative_tokens": 3}, dtype="bfloat16")
    model = ExactModel(str(path), dtype="bfloat16", device="cpu", max_model_len=60)
    sequences, starts, logprobs = rollout(llm, PROMPTS, params(24, logprobs=0))
    assert all_equal(model(sequences, starts), logprobs)
    assert llm.speculation_metrics.num_accepted_tokens > 0
    assert llm.update_weights(model.state_dict().items()) == 1


def test_prompts_are_scored_as_by_prompt_logprobs(checkpoints):
    model = ExactModel(str(checkpoints("qwen3")), dtype="bfloat16", device="cpu")
    outputs = engine(checkpoints("qwen3"), dtype="bfloat16").generate(
        PROMPTS, params(1, prompt_logprobs=0)
    )
    for ours, output in zip(model([p["prompt_token_ids"] for p in PROMPTS]), outputs, strict=True):
        ids, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
        theirs = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
        assert torch.equal(ours, torch.tensor(theirs))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_optimizers_step_reaches_both_sides(name, checkpoints):
    """Parameters in fp32, a pass and an engine in bf16; no weight stays as it was packed."""
    path = checkpoints(name)
    model = ExactModel(str(path), dtype="bfloat16", device="cpu", max_model_len=60).float()
    llm = engine(path, NGRAM, dtype="bfloat16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before, starts, logprobs = rollout(llm, PROMPTS, params(20, logprobs=0))
    torch.cat(model(before, starts)).mean().neg().backward()
    optimizer.step()
    stale = model(before, starts)
    assert not any(torch.equal(a, b) for a, b in zip(stale, logprobs, strict=True))
    assert llm.update_weights(model.state_dict().items()) == 1
    after, starts, logprobs = rollout(llm, PROMPTS, params(20, logprobs=0))
    assert all_equal(model(after, starts), logprobs)
    assert after != before


@pytest.fixture
def grpo():
    with imported("rollouts", "grpo") as modules:
        yield modules.grpo


@pytest.fixture
def small(grpo):
    return grpo.Options(steps=4, num_prompts=2, group=4, max_tokens=16)


@pytest.mark.parametrize(("dtype", "drafter"), [("float32", "suffix"), ("bfloat16", "ngram")])
def test_training_with_drafts_ends_with_the_same_weights(grpo, small, dtype, drafter, tmp_path):
    path = grpo.write_model(tmp_path, seed=0)
    options = dataclasses.replace(small, dtype=dtype)
    plain, drafted = (grpo.train(path, name, options) for name in ("none", drafter))
    for run in (plain, drafted):
        assert run.tokens == 4 * 2 * 4 * 16
        assert (run.unequal, run.worst_ratio, run.worst_kl) == (0, 1.0, 0.0)
        assert run.sha256 == plain.sha256
        assert run.rewards == plain.rewards
    assert drafted.accepted > 0
    untrained = ExactModel(str(path), dtype=dtype, device="cpu").float()
    assert grpo.sha256(untrained) != plain.sha256


def test_a_rollout_by_older_weights_is_noticed(grpo, small, tmp_path, monkeypatch):
    monkeypatch.setattr(LLM, "update_weights", lambda llm, weights: None)
    run = grpo.train(grpo.write_model(tmp_path, seed=0), "none", small)
    assert run.unequal > run.tokens / 2
    assert run.worst_ratio > 1
    assert run.worst_kl > 0


def test_a_longer_model_len_changes_no_bit(checkpoints):
    """Only LongRoPE reads it."""
    sequences = [list(range(30))]
    longer, shorter = (
        ExactModel(str(checkpoints("llama")), device="cpu", max_model_len=n) for n in (128, 30)
    )
    assert all_equal(longer(sequences), shorter(sequences))
    llm = engine(checkpoints("llama"), max_model_len=100, num_kv_blocks=30)
    prompts = [{"prompt_token_ids": ids[:20]} for ids in sequences]
    found = rollout(llm, prompts, SamplingParams(max_tokens=60, logprobs=0, detokenize=False))
    assert all_equal(longer(found[0], found[1]), found[2])

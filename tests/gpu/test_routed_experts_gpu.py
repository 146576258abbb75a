"""Returned experts on a GPU: those of eager steps without drafts, out of captured ones too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_files import LENGTHS, OPTIONS, SIZES
from recorded_gpu import windows_must_be_captured
from test_mamba2_gpu import NANO
from transformers import Qwen3MoeConfig

from helpers.families import random_model
from helpers.nemotron import write_twin
from sametoken import LLM, SamplingParams

MAX_TOKENS, COUNT = 48, 16
#: More experts than fit one byte.
EXPERTS = {"num_experts": 300, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
MTP = {"method": "mtp", "num_speculative_tokens": 3}


def write_mixture(folder):
    """A random Qwen3-MoE, dense in its first layer."""
    shape = SIZES | {"num_hidden_layers": 4}
    config = Qwen3MoeConfig(**shape, **EXPERTS, mlp_only_layers=[0], eos_token_id=None)
    random_model(config, 0).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    """With a module that drafts as the target decides, and has experts of its own."""
    sizes = NANO | {"dtype": "float32", "n_routed_experts": 8}
    return write_twin(tmp_path_factory.mktemp("twin"), seed=6, **sizes)


def prompts():
    """Of all lengths; they repeat themselves, and begin as a twin's must."""
    generator = torch.Generator().manual_seed(1)
    for i in range(COUNT):
        length, period = LENGTHS[i % len(LENGTHS)], 3 + i % 5
        pattern = torch.randint(1, 1500, (period,), generator=generator).tolist()
        yield [0, *(pattern * length)[: length - 1]]


def generate(llm: LLM):
    """Every third request is sampled."""
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.8 * (i % 3 == 1), seed=i, ignore_eos=True
        )
        for i in range(COUNT)
    ]
    asked = [{"prompt_token_ids": one} for one in prompts()]
    return [one.outputs[0] for one in llm.generate(asked, params)]


def engine(path, spec: dict | None, **options) -> LLM:
    return LLM(
        str(path),
        speculative_config=spec,
        enable_return_routed_experts=True,
        skip_tokenizer_init=True,
        **OPTIONS | {"max_num_seqs": 7} | options,
    )


def plain(path, **options):
    """What eager steps without drafts say, one step in flight."""
    return generate(engine(path, None, enforce_eager=True, steps_in_flight=1, **options))


@pytest.fixture(scope="module")
def truth(mixture, nemotron):
    return {"mixture": plain(mixture), "nemotron": plain(nemotron)}


def require_equal(found, expected) -> None:
    assert found == expected
    for prompt, one, other in zip(prompts(), found, expected, strict=True):
        assert one.routed_experts.shape[0] == len(prompt) + MAX_TOKENS - 1
        assert one.routed_experts.dtype == other.routed_experts.dtype
        assert np.array_equal(one.routed_experts, other.routed_experts)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("name", "spec", "steps_in_flight"),
    [
        ("mixture", None, 2),
        ("mixture", NGRAM, 1),
        ("mixture", "self", 3),
        ("nemotron", MTP, 1),
        ("nemotron", MTP, 3),
    ],
)
def test_experts_are_those_of_eager_steps_without_drafts(
    request, truth, monkeypatch, name, spec, steps_in_flight, eager
):
    path = request.getfixturevalue(name)
    if spec == "self":
        spec = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    if not eager:
        windows_must_be_captured(monkeypatch)
    llm = engine(path, spec, enforce_eager=eager, steps_in_flight=steps_in_flight)
    require_equal(generate(llm), truth[name])
    metrics = llm.speculation_metrics
    assert (metrics.num_accepted_tokens > 0) == (spec is not None)
    if name == "mixture":
        # A random router leaves hardly an expert out, and those of a dense layer are 0.
        experts = np.concatenate([one.routed_experts for one in truth[name]])
        assert (experts.dtype, experts.shape[1:]) == (np.uint16, (4, 4))
        assert len(np.unique(experts[:, 1:])) > 100
        assert not experts[:, 0].any()


def test_graphs_that_are_captured_again_write_to_the_same_memory(mixture, truth, monkeypatch):
    windows_must_be_captured(monkeypatch)
    llm = engine(mixture, NGRAM)
    require_equal(generate(llm), truth["mixture"])
    llm.sleep(1)
    llm.wake_up()
    require_equal(generate(llm), truth["mixture"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_return_the_first_one_s(tmp_path, monkeypatch):
    """Each degree has an arithmetic of its own, which chooses experts too."""
    path = write_mixture(tmp_path)
    expected = plain(path, tensor_parallel_size=2)
    windows_must_be_captured(monkeypatch)
    llm = engine(path, NGRAM, tensor_parallel_size=2, steps_in_flight=2)
    require_equal(generate(llm), expected)
    assert llm.speculation_metrics.num_accepted_tokens > 0

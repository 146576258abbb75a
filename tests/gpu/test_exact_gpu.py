"""A trainer's log-probabilities on a GPU are the engine's to the bit; its gradients those of fp32.

Engines run captured graphs, with and without drafts. Gradients are compared with transformers'.
"""

from __future__ import annotations

import re

import pytest
import torch
from gpu_files import (
    HYBRID_SIZES,
    OPTIONS,
    SIZES,
    for_llm,
    requests,
    speculation,
    write_files,
    write_hybrid_target,
)
from test_mamba2_gpu import NANO
from test_mamba2_gpu import write_target as write_nemotron
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from helpers.exact import Scene, all_equal, as_stored, rollout
from helpers.families import random_model
from helpers.hybrids import FULL, LINEAR, hybrid_config
from sametoken import LLM, SamplingParams
from sametoken.errors import NumericalError
from sametoken.exact import ExactModel

DEVICE = OPTIONS["device"]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 8,
    "prompt_lookup_min": 1,
    "draft_limits": "fixed",
}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
#: Some prompts are longer than a chunk of prefill; every third request is sampled.
COUNT, MAX_TOKENS = 20, 24
NANO_LAYERS = "M*ME-"
#: Eight of them, so that some have more rows than a tile.
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def write(folder, name: str) -> dict:
    """A target, and the drafters that run with it."""
    if name == "qwen3_5":
        target = write_hybrid_target(folder, hybrid_config(name, **HYBRID_SIZES))
        return {"target": target, "drafters": [None, NGRAM, MTP]}
    if name == "nemotron_h":
        return {"target": write_nemotron(folder, NANO, NANO_LAYERS), "drafters": [None, NGRAM]}
    if name == "qwen3_moe":
        config = Qwen3MoeConfig(**SIZES, **EXPERTS, eos_token_id=None)
        random_model(config, 0).bfloat16().save_pretrained(folder)
        return {"target": folder, "drafters": [None, NGRAM]}
    files = write_files(folder, name)
    drafters = speculation(files)
    return files | {"drafters": [None, NGRAM, drafters["self"], drafters["eagle3"]]}


@pytest.fixture(
    scope="module",
    params=["LlamaForCausalLM", "Qwen3ForCausalLM", "qwen3_moe", "qwen3_5", "nemotron_h"],
)
def files(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def exact(files):
    return ExactModel(str(files["target"]), device=DEVICE, max_model_len=640)


def engine(files, spec: dict | None) -> LLM:
    options = OPTIONS | {"max_num_seqs": 8, "skip_tokenizer_init": True}
    return LLM(str(files["target"]), speculative_config=spec, **options)


def asked():
    return for_llm(list(requests(COUNT, MAX_TOKENS)), logprobs=0)


def scored(model: ExactModel, sequences, starts) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(one.cpu() for one in model(sequences, starts))


@pytest.fixture(scope="module")
def rollouts(files):
    """Of every drafter: sequences, prompts' lengths, log-probabilities."""
    found = []
    for spec in files["drafters"]:
        llm = engine(files, spec)
        found.append(rollout(llm, *asked()))
        if spec is not None:
            assert llm.speculation_metrics.num_draft_tokens > 0
            # Of the others, random targets accept next to nothing.
            accepts = spec["method"] == "draft_model"
            assert not accepts or llm.speculation_metrics.num_accepted_tokens > 0
    return found


def test_log_probabilities_are_those_of_every_rollout(exact, rollouts):
    """Whole batches at once, and sequences alone."""
    for sequences, starts, logprobs in rollouts:
        assert sequences == rollouts[0][0]
        assert all_equal(scored(exact, sequences, starts), logprobs)
    for ids, start, wanted in zip(*rollouts[0], strict=True):
        assert torch.equal(scored(exact, [ids], [start])[0], wanted), len(ids)


def test_no_packing_changes_a_bit(exact, rollouts):
    sequences, starts, logprobs = rollouts[0]
    for size in (2, 7):
        for first in range(0, COUNT, size):
            part = slice(first, first + size)
            found = scored(exact, sequences[part][::-1], starts[part][::-1])
            assert all_equal(found[::-1], logprobs[part])


def test_gradients_take_no_bit_from_the_forward_pass(exact, rollouts):
    sequences, starts, logprobs = rollouts[0]
    found = exact(sequences, starts)
    assert all_equal([one.detach().cpu() for one in found], logprobs)


def test_parameters_in_fp32_give_the_same(files, rollouts):
    sequences, starts, logprobs = rollouts[0]
    model = ExactModel(str(files["target"]), device=DEVICE, max_model_len=640).float()
    assert all_equal(scored(model, sequences, starts), logprobs)


def test_prompts_are_scored_as_by_prompt_logprobs(files, exact):
    prompts = [prompt for prompt in asked()[0] if len(prompt["prompt_token_ids"]) > 1]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = engine(files, None).generate(prompts, params)
    found = scored(exact, [prompt["prompt_token_ids"] for prompt in prompts], None)
    for ours, output in zip(found, outputs, strict=True):
        ids, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
        theirs = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
        assert torch.equal(ours, torch.tensor(theirs))


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_value_that_is_not_finite_is_refused_by_name(files, value):
    model = ExactModel(str(files["target"]), device=DEVICE, max_model_len=640)
    name, parameter = next(reversed([*model.named_parameters()]))
    with torch.no_grad():
        parameter.view(-1)[-1] = value
    with pytest.raises(NumericalError, match=re.escape(name)):
        model([[1, 2]])


def test_an_optimizers_step_reaches_both_sides(files):
    model = ExactModel(str(files["target"]), device=DEVICE, max_model_len=640).float()
    llm, (prompts, params) = engine(files, NGRAM), asked()
    before, starts, logprobs = rollout(llm, prompts, params)
    torch.cat(model(before, starts)).mean().neg().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    stale = scored(model, before, starts)
    assert not any(torch.equal(a, b) for a, b in zip(stale, logprobs, strict=True))
    assert llm.update_weights(model.state_dict().items()) == 1
    after, starts, logprobs = rollout(llm, prompts, params)
    assert all_equal(scored(model, after, starts), logprobs)


# Gradients

SMALL = SIZES | {"num_hidden_layers": 2, "eos_token_id": None, "pad_token_id": None}
HYBRID = SMALL | {
    name: size for name, size in HYBRID_SIZES.items() if name.startswith(("linear", "head_dim"))
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama-tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=40),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, sliding_window=40),
    "qwen3_5": lambda: Qwen3_5TextConfig(**HYBRID, layer_types=[LINEAR, FULL]),
    "nemotron_h": lambda: NemotronHConfig(
        **SMALL | NANO | {"num_hidden_layers": 3},
        layers_block_type=["mamba", "attention", "mlp"],
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS),
}
#: The routers of these choose others where a number is rounded, so gradients may jump.
CHOOSING = ("qwen3_moe",)
SCENE = Scene(1500, (2, 65, 300, 129))
#: As on a CPU: tests/unit/exact/test_gradients.py.
FP32_ERRORS = {"qwen3_5": 1e-4, "nemotron_h": 1e-4}
FP32_ERROR, BF16_ERRORS = 1e-5, 1.5


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(CONFIGS[request.param](), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                # Deeper sums than those of a CPU's tests: scores of the same size.
                parameter.mul_(0.3)
    model.save_pretrained(folder)
    return request.param, folder


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs).norm() / theirs.norm().clamp(min=1e-20)).item()


def test_fp32_gradients_are_those_of_plain_autograd(checkpoint):
    name, folder = checkpoint
    model = ExactModel(str(folder), dtype="float32", device=DEVICE)
    found = SCENE.exact_gradients(model)
    wanted = SCENE.plain_gradients(folder, torch.float32, next(model.parameters()).device)
    wanted = as_stored(wanted, found)
    assert found.keys() == wanted.keys()
    errors = {one: error(gradient, wanted[one]) for one, gradient in found.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < FP32_ERRORS.get(name, FP32_ERROR), worst


@pytest.mark.parametrize(
    "checkpoint", [name for name in CONFIGS if name not in CHOOSING], indirect=True
)
def test_bf16_gradients_err_as_those_of_autograd_in_bf16(checkpoint):
    _, folder = checkpoint
    model = ExactModel(str(folder), dtype="bfloat16", device=DEVICE)
    device = next(model.parameters()).device
    found = SCENE.exact_gradients(model)
    theirs = as_stored(SCENE.plain_gradients(folder, torch.bfloat16, device), found)
    wanted = as_stored(SCENE.plain_gradients(folder, torch.float32, device, rounded=True), found)
    assert found.keys() == wanted.keys() == theirs.keys()

    def whole(gradients: dict) -> torch.Tensor:
        return torch.cat([gradients[one].flatten().float() for one in wanted])

    ours = error(whole(found), whole(wanted))
    assert 0 < ours < BF16_ERRORS * error(whole(theirs), whole(wanted))


def test_the_backward_pass_gives_the_same_bits_every_time(checkpoint):
    _, folder = checkpoint
    model = ExactModel(str(folder), dtype="bfloat16", device=DEVICE)
    first = SCENE.exact_gradients(model)
    for _ in range(3):
        again = SCENE.exact_gradients(model)
        assert all(torch.equal(gradient, again[one]) for one, gradient in first.items())

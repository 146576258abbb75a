"""Every bad input has one typed error that names its cause and a remedy.

Whatever is wrong with options or files is said by the constructor, before memory is laid
out; whatever is wrong with a request is said by the call, before a step runs, and other
requests go on.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from helpers.chat_model import SPECIAL, vocab_size, write_chat_model
from helpers.checkpoints import (
    LLAMA,
    VOCAB,
    change_config,
    change_tensors,
    head_tensors,
    write_llama,
    write_speculators,
)
from sametoken import LLM, SamplingParams
from sametoken.errors import (
    CheckpointError,
    ConfigError,
    DrafterMismatchError,
    EngineDeadError,
    NumericalError,
    RequestError,
    SametokenError,
    UnsupportedError,
)
from sametoken.runner.step import Step

SIZES = {
    "skip_tokenizer_init": True,
    "max_model_len": 48,
    "max_num_seqs": 2,
    "prefill_chunk_size": 16,
    "block_size": 8,
    "num_kv_blocks": 40,
}
LFS = "version https://git-lfs.github.com/spec/v1"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def speculative(method: str = "ngram", k: object = 3, **keys) -> dict:
    return {"speculative_config": {"method": method, "num_speculative_tokens": k, **keys}}


def edited(target, directory, config=None, tensors=None):
    """A copy of a checkpoint with some settings or tensors changed."""
    shutil.copytree(target, directory)
    change_config(directory, **config or {})
    return change_tensors(directory, lambda old: old | (tensors or {}))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def llm(target):
    return LLM(str(target), **SIZES, **speculative())


@pytest.fixture
def nothing_may_load(monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("sametoken.engine.load.load_model", load)


def refused(error: type[SametokenError], cause: str, remedy: str, call, *args, **options) -> None:
    with pytest.raises(error, match=cause) as caught:
        call(*args, **options)
    assert type(caught.value) is error
    assert remedy in caught.value.remedy, caught.value.remedy
    sentence = caught.value.remedy[:1].upper() + caught.value.remedy[1:]
    assert str(caught.value) == f"{caught.value.cause}. {sentence}"


# Checkpoints


def test_a_model_that_is_not_there(tmp_path):
    path = str(tmp_path / "nowhere")
    refused(CheckpointError, "nowhere' is neither a path", "checkpoint directory", LLM, path)


def test_a_directory_without_a_config(tmp_path):
    refused(CheckpointError, r"holds no config\.json", "checkpoint directory", LLM, str(tmp_path))


def test_a_config_that_is_not_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    refused(CheckpointError, "cannot be read as JSON", "download", LLM, str(tmp_path))


def test_a_missing_tensor(target, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    directory = edited(target, tmp_path / "lacking")
    change_tensors(directory, lambda old: {key: old[key] for key in old.keys() - {name}})
    cause = r"lacks the tensor model\.layers\.1\.mlp\.up_proj"
    refused(CheckpointError, cause, "checkpoint again", LLM, str(directory), **SIZES)


def test_a_tensor_of_another_shape(target, tmp_path):
    directory = edited(target, tmp_path / "shape", tensors={"model.norm.weight": torch.ones(8)})
    cause = r"model\.norm\.weight .* has shape \[8\], the config expects \[16\]"
    refused(CheckpointError, cause, "belong together", LLM, str(directory), **SIZES)


def test_integer_weights(target, tmp_path):
    whole = torch.zeros((VOCAB, LLAMA["hidden_size"]), dtype=torch.int8)
    directory = edited(target, tmp_path / "int8", tensors={"lm_head.weight": whole})
    cause = r"lm_head\.weight .* has dtype I8"
    refused(UnsupportedError, cause, "unquantized", LLM, str(directory), **SIZES)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(target, tmp_path, value):
    bad = torch.ones(LLAMA["hidden_size"])
    bad[3] = value
    directory = edited(target, tmp_path / "nan", tensors={"model.norm.weight": bad})
    cause = r"model\.norm\.weight .* holds NaN or infinite"
    refused(CheckpointError, cause, "again", LLM, str(directory), **SIZES)


def test_an_unknown_architecture(target, tmp_path):
    directory = edited(target, tmp_path / "arch", {"architectures": ["MambaForCausalLM"]})
    cause = "'MambaForCausalLM' is not supported"
    refused(UnsupportedError, cause, "LlamaForCausalLM", LLM, str(directory), **SIZES)


# Drafters


def test_a_drafter_that_is_not_there(target, tmp_path):
    options = SIZES | speculative("draft_model", model=str(tmp_path / "nowhere"))
    cause = "nowhere"
    refused(CheckpointError, cause, "checkpoint directory", LLM, str(target), **options)


def test_a_drafter_of_another_vocabulary(tmp_path, nothing_may_load):
    target = write_chat_model(tmp_path / "target")
    other = write_chat_model(tmp_path / "other", vocab_size=vocab_size() + 8)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace(SPECIAL[1], "<other>"))
    options = SIZES | speculative("draft_model", model=str(other))
    cause = f"is '<other>' to the draft model and '{SPECIAL[1]}' to the target"
    refused(DrafterMismatchError, cause, "same vocabulary", LLM, str(target), **options)


def test_a_head_of_another_hidden_size(target, tmp_path, nothing_may_load):
    head = write_speculators(tmp_path / "head", head_tensors(), target_hidden_size=32)
    options = SIZES | speculative("eagle3", model=str(head))
    cause = "32 hidden elements, the target has 16"
    refused(DrafterMismatchError, cause, "trained for this target", LLM, str(target), **options)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda weights: weights.unlink(), "holds no safetensors file"),
        (lambda weights: weights.write_bytes(weights.read_bytes()[:-100]), "truncated or corrupt"),
        (lambda weights: weights.write_text(f"{LFS}\noid 1"), "run git lfs pull"),
    ],
    ids=["none", "cut", "pointer"],
)
def test_a_drafter_without_weights_costs_no_reading_of_the_target_s(
    target, tmp_path, method, spoil, cause
):
    bad = {"model.norm.weight": torch.full((LLAMA["hidden_size"],), torch.nan)}
    unreadable = edited(target, tmp_path / "target", tensors=bad)
    drafter = tmp_path / "drafter"
    if method == "eagle3":
        write_speculators(drafter, head_tensors())
    else:
        write_llama(drafter)
    spoil(drafter / "model.safetensors")
    options = SIZES | speculative(method, model=str(drafter))
    refused(CheckpointError, f"drafter.*{cause}", "again", LLM, str(unreadable), **options)


# Options


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        ({"max_model_len": 65}, "max_model_len=65 is above the model's 64", "lower max_model_len"),
        (
            speculative(k=8) | {"max_num_batched_tokens": 8},
            "max_num_batched_tokens=8 holds no window of 9 rows",
            "raise max_num_batched",
        ),
        (
            {"num_kv_blocks": 3},
            "the KV memory holds 24 tokens",
            "max_model_len=24 or less, or num_kv_blocks=6 or more",
        ),
        ({"max_model_length": 5}, "unknown option 'max_model_length'", "max_model_len"),
    ],
)
def test_an_option_that_cannot_be(target, nothing_may_load, options, cause, remedy):
    refused(ConfigError, cause, remedy, LLM, str(target), **SIZES | options)


def test_a_device_that_is_not_there(target, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(UnsupportedError, "there is no GPU", "cpu", LLM, str(target), device="cuda")


# Requests


@pytest.mark.parametrize(
    ("prompt", "cause", "remedy"),
    [
        ([], "the prompt is empty", "at least one token"),
        ([1] * 48, "has 48 tokens > 47 maximum", "raise max_model_len"),
        ([1, VOCAB], f"holds {VOCAB}, outside the vocabulary", f"0 to {VOCAB - 1}"),
        ([1, -1], "holds -1, outside the vocabulary", f"0 to {VOCAB - 1}"),
        ([1, 2.5], "holds 2.5", "integers"),
    ],
)
def test_a_prompt_that_cannot_be(llm, monkeypatch, prompt, cause, remedy):
    prompts = [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": prompt}]
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", None)
        refused(RequestError, cause, remedy, llm.generate, prompts, GREEDY)
    assert len(llm.generate(prompts[:1], GREEDY)[0].outputs[0].token_ids) == 6


def test_a_text_without_a_tokenizer(llm):
    cause = "needs a tokenizer but skip_tokenizer_init is set"
    refused(RequestError, cause, "prompt_token_ids", llm.generate, "a text", GREEDY)


@pytest.mark.parametrize(
    ("params", "cause", "remedy"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds {VOCAB}", f"0 to {VOCAB - 1}"),
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids holds {VOCAB}", f"0 to {VOCAB - 1}"),
        ({"allowed_token_ids": [-2]}, "allowed_token_ids holds -2", f"0 to {VOCAB - 1}"),
        (
            {"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1},
            "together forbid every token",
            "allow a token",
        ),
    ],
)
def test_parameters_that_the_model_cannot_serve(llm, params, cause, remedy):
    chosen = SamplingParams(max_tokens=6, **params)
    prompt = {"prompt_token_ids": [1, 2]}
    refused(RequestError, cause, remedy, llm.generate, prompt, chosen)


def test_a_bad_request_leaves_running_ones_alone(llm):
    prompt = {"prompt_token_ids": [3, 4, 5]}
    (alone,) = llm.generate(prompt, GREEDY)
    stream = llm.generate_stream(prompt, GREEDY)
    next(stream)
    with pytest.raises(RequestError):
        llm.generate({"prompt_token_ids": []}, GREEDY)
    assert list(stream)[-1].outputs[0].token_ids == alone.outputs[0].token_ids


# At run time


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_nan_logits_end_one_request_alone(target, monkeypatch, steps_in_flight):
    """A NaN in one row of the logits is the error of that row's request."""
    llm = LLM(str(target), **SIZES, **speculative(), steps_in_flight=steps_in_flight)
    prompts = [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [6, 7]}]
    expected = llm.generate(prompts[:1], GREEDY)[0].outputs[0]
    verify = Step._verify

    def poisoned(self, computed):
        slots, rows = computed.x.slots, computed.x.sampled
        ill = (rows.positions - rows.offsets) % 2 == 1
        if len(slots) == 2:
            computed.logits[ill & (rows.slots == slots[1])] = torch.nan
        return verify(self, computed)

    monkeypatch.setattr(Step, "_verify", poisoned)
    good, bad = llm.generate(prompts, GREEDY)
    assert good.outputs[0].token_ids == expected.token_ids
    assert bad.outputs[0].finish_reason == "error"
    assert isinstance(bad.outputs[0].error, NumericalError)
    assert "NaN" in str(bad.outputs[0].error)
    assert bad.outputs[0].error.remedy
    llm._engine.scheduler.check_integrity()


def test_a_step_that_fails_ends_the_engine_and_later_calls_say_so(target):
    llm = LLM(str(target), **SIZES)
    prompt = {"prompt_token_ids": [1, 2]}

    def fail(*args):
        raise MemoryError("no memory for logits")

    llm._engine._runner.step.model.compute_logits = fail
    cause = r"a step failed: MemoryError\('no memory for logits'\)"
    refused(EngineDeadError, cause, "restart", llm.generate, prompt, GREEDY)
    cause = r"the engine stopped after MemoryError\('no memory for logits'\)"
    refused(EngineDeadError, cause, "restart", llm.generate, prompt, GREEDY)
    refused(EngineDeadError, cause, "restart", llm._engine.step)


def test_a_head_size_that_the_kernels_cannot_run_is_refused_at_load(tmp_path):
    path = write_llama(tmp_path / "odd", head_dim=12)
    refused(UnsupportedError, "head_dim 12", "SAMETOKEN_KERNELS", LLM, str(path), **SIZES)


@pytest.mark.parametrize("memory", [{"num_kv_blocks": 5}, {"kv_cache_memory_bytes": 5000}])
def test_kv_for_less_than_a_request_is_refused_before_anything_is_loaded(
    target, nothing_may_load, memory
):
    cause = "max_model_len=48 takes .* of KV for a request"
    options = SIZES | {"num_kv_blocks": None} | memory
    refused(ConfigError, cause, f"{next(iter(memory))}=", LLM, str(target), **options)

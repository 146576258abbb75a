"""Gradients are those of transformers' model in fp32, and in bf16 as near to them as its own."""

from __future__ import annotations

import pytest
import torch

from helpers.exact import (
    CONFIGS,
    CPU,
    HYBRIDS,
    WITH_EXPERTS,
    Scene,
    all_equal,
    as_stored,
    write_exact,
)
from helpers.families import VOCAB
from sametoken.exact import ExactModel, functions
from sametoken.layers import slices

SCENE = Scene(VOCAB, (2, 17, 30, 9))
#: Of two sums of fp32 products in different orders.
FP32_ERROR = 1e-5
#: Of those through the norms of short q and k: transformers' differ by 7e-5 from its own in fp64.
HYBRID_ERROR = 1e-4
#: Of our error in bf16 by that of autograd in bf16; over families and seeds it was 0.35 to 1.37.
BF16_ERRORS = 1.5


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs).norm() / theirs.norm().clamp(min=1e-20)).item()


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_gradients_are_those_of_plain_autograd(name, tmp_path):
    path = write_exact(tmp_path, name)
    found = SCENE.exact_gradients(ExactModel(str(path), dtype="float32", device="cpu"))
    wanted = as_stored(SCENE.plain_gradients(path, torch.float32), found)
    bound = HYBRID_ERROR if name in HYBRIDS else FP32_ERROR
    for parameter, gradient in found.items():
        if parameter.endswith("layer_scalar"):
            # A constant of transformers' model.
            continue
        assert error(gradient, wanted.pop(parameter)) < bound, parameter
    # An expert that no row chose.
    assert not any(gradient.any() for gradient in wanted.values())


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modes_of_the_thread_change_no_bit(name, dtype, tmp_path):
    model = ExactModel(str(write_exact(tmp_path, name)), dtype=dtype, device="cpu")
    logprobs, wanted = model(SCENE.on(CPU)[0]), SCENE.exact_gradients(model)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert all_equal(model(SCENE.on(CPU)[0]), logprobs)
        found = SCENE.exact_gradients(model)
    assert found.keys() == wanted.keys()
    assert all_equal(found.values(), wanted.values())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WITH_EXPERTS][::2])
def test_bf16_gradients_err_as_those_of_autograd_in_bf16(name, tmp_path):
    path = write_exact(tmp_path, name)
    model = ExactModel(str(path), dtype="bfloat16", device="cpu")
    found, theirs = SCENE.exact_gradients(model), SCENE.plain_gradients(path, torch.bfloat16)
    wanted = SCENE.plain_gradients(path, torch.float32, rounded=True)
    assert found.keys() == wanted.keys()

    def whole(gradients: dict) -> torch.Tensor:
        return torch.cat([gradients[parameter].flatten().float() for parameter in wanted])

    ours = error(whole(found), whole(wanted))
    assert 0 < ours < BF16_ERRORS * error(whole(theirs), whole(wanted))
    for name, parameter in model.named_parameters():
        # As the engine reads them.
        gate = name.endswith(("A_log", "dt_bias", "mamba.D"))
        assert parameter.dtype == (torch.float32 if gate else torch.bfloat16)
        assert found[name].dtype == parameter.dtype


def test_the_backward_pass_gives_the_same_bits_every_time(tmp_path):
    model = ExactModel(str(write_exact(tmp_path, "qwen3")), dtype="bfloat16", device="cpu")
    first, second = SCENE.exact_gradients(model), SCENE.exact_gradients(model)
    assert all(torch.equal(gradient, second[name]) for name, gradient in first.items())


def test_slices_and_chunks_of_logits_change_no_gradient(tmp_path, monkeypatch):
    model = ExactModel(str(write_exact(tmp_path, "gemma3")), dtype="float32", device="cpu")
    sequences, _ = SCENE.on(CPU)
    whole, logprobs = SCENE.exact_gradients(model), torch.cat(model(sequences))
    monkeypatch.setattr(slices, "SLICE_ROWS", 7)
    monkeypatch.setattr(functions, "SCORED_BYTES", 3 * VOCAB * 4)
    assert torch.equal(torch.cat(model(sequences)), logprobs)
    for name, gradient in SCENE.exact_gradients(model).items():
        assert error(gradient, whole[name]) < FP32_ERROR, name


@pytest.mark.parametrize("trained", ["lm_head", "norm", "q_proj", "embed_tokens", "k_norm"])
def test_frozen_parameters_get_none_and_change_no_other(trained, tmp_path):
    model = ExactModel(str(write_exact(tmp_path, "qwen3")), dtype="float32", device="cpu")
    whole = SCENE.exact_gradients(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    some = SCENE.exact_gradients(model)
    assert some.keys() == {name for name in whole if trained in name}
    assert all(torch.equal(gradient, whole[name]) for name, gradient in some.items())


def test_gradients_are_of_the_weights_of_the_forward_pass(tmp_path):
    """Whatever becomes of the parameters before the backward pass."""
    model = ExactModel(str(write_exact(tmp_path, "llama")), dtype="float32", device="cpu")
    whole = SCENE.exact_gradients(model)
    sequences, weights = SCENE.on(CPU)
    logprobs = torch.cat(model(sequences))
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    (logprobs * weights).sum().backward()
    assert all(torch.equal(one.grad, whole[name]) for name, one in model.named_parameters())

"""The kernels under gradients: those of a GPU in the interpreter, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5TextConfig

from helpers.exact import HYBRID, all_equal, write_exact
from helpers.families import SIZES, random_model
from sametoken.errors import UnsupportedError
from sametoken.exact import ExactModel, model
from sametoken.exact.kernels import differentiable
from sametoken.ops.model.gemm.tuning import TuningTable
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels

SEQUENCES = [[1, 2, 3, 4, 5], [7, 8]]


def on_both(path, monkeypatch):
    """A model on this machine's kernels and on a GPU's, with gradients, and their outputs."""
    plain = ExactModel(str(path), dtype="float32", device="cpu")
    wanted = plain(SEQUENCES)
    torch.cat(wanted).sum().backward()
    kernels = TritonKernels(TuningTable())
    monkeypatch.setattr(model, "select_kernels", lambda device: kernels)
    exact = ExactModel(str(path), dtype="float32", device="cpu")
    found = exact(SEQUENCES)
    torch.cat(found).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not all_equal(found, wanted)
    assert torch.equal(exact(SEQUENCES[1:])[0], found[1])
    return zip(exact.parameters(), plain.parameters(), strict=True)


def test_a_gpus_kernels_take_gradients_too(tmp_path, monkeypatch):
    """The interpreter runs them in fp32; packed rows have the bits of single sequences."""
    for ours, theirs in on_both(write_exact(tmp_path, "qwen3"), monkeypatch):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_and_those_of_recurrent_layers(tmp_path, monkeypatch):
    one = SIZES | HYBRID | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    random_model(Qwen3_5TextConfig(**one), 0).save_pretrained(tmp_path)
    for ours, theirs in on_both(tmp_path, monkeypatch):
        assert (ours.grad - theirs.grad).norm() < 1e-4 * theirs.grad.norm()


def test_experts_are_refused_where_a_kernel_runs_them_all(tmp_path, monkeypatch):
    kernels = TritonKernels(TuningTable())
    monkeypatch.setattr(model, "select_kernels", lambda device: kernels)
    with pytest.raises(UnsupportedError, match="experts have gradients on a CPU alone"):
        ExactModel(str(write_exact(tmp_path, "qwen3_moe")), dtype="float32", device="cpu")


def test_what_has_no_gradients_is_refused_by_name():
    kernels = differentiable(ReferenceKernels())
    with pytest.raises(UnsupportedError, match="clamped_swiglu has no gradients"):
        kernels.clamped_swiglu(torch.ones(1, 4), 1.0, 1.0)
    with pytest.raises(UnsupportedError, match="no gradients"):
        kernels.pack(torch.ones(4, 4)).quantize_fp8()

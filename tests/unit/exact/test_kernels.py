"""The kernels under gradients: those of a GPU in the interpreter, and what is refused."""

from __future__ import annotations

import pytest
import torch

from helpers.exact import all_equal, write_exact
from sametoken.errors import UnsupportedError
from sametoken.exact import ExactModel, model
from sametoken.exact.kernels import differentiable
from sametoken.ops.model.gemm.tuning import TuningTable
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels

SEQUENCES = [[1, 2, 3, 4, 5], [7, 8]]


def test_a_gpus_kernels_take_gradients_too(tmp_path, monkeypatch):
    """The interpreter runs them in fp32; packed rows have the bits of single sequences."""
    path = str(write_exact(tmp_path, "qwen3"))
    plain = ExactModel(path, dtype="float32", device="cpu")
    wanted = plain(SEQUENCES)
    torch.cat(wanted).sum().backward()
    kernels = TritonKernels(TuningTable())
    monkeypatch.setattr(model, "select_kernels", lambda device: kernels)
    exact = ExactModel(path, dtype="float32", device="cpu")
    found = exact(SEQUENCES)
    torch.cat(found).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(exact.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert not all_equal(found, wanted)
    assert torch.equal(exact(SEQUENCES[1:])[0], found[1])


def test_experts_are_refused_where_a_kernel_runs_them_all(tmp_path, monkeypatch):
    kernels = TritonKernels(TuningTable())
    monkeypatch.setattr(model, "select_kernels", lambda device: kernels)
    with pytest.raises(UnsupportedError, match="experts have gradients on a CPU alone"):
        ExactModel(str(write_exact(tmp_path, "qwen3_moe")), dtype="float32", device="cpu")


def test_what_has_no_gradients_is_refused_by_name():
    kernels = differentiable(ReferenceKernels())
    with pytest.raises(UnsupportedError, match="gated_rms_norm has no gradients"):
        kernels.gated_rms_norm(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), 1e-6)
    with pytest.raises(UnsupportedError, match="no gradients"):
        kernels.pack(torch.ones(4, 4)).quantize_fp8()

"""Which matrices of a draft head become fp8, and what becomes of the others."""

from __future__ import annotations

import weakref

import pytest
import torch

from helpers.checkpoints import HIDDEN, VOCAB
from helpers.head_files import HeadFiles
from helpers.packed import packed_in
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.reference import PlainWeight, ReferenceKernels

HEADS = ("eagle", "eagle3", "mtp", "mtp with experts")
EMBEDDING = {"embedding"}
PROJECTIONS = {
    "eagle": {"fc.weight", "lm_head"}
    | {f"layers.0.attention.{name}.weight" for name in ("qkv", "output")}
    | {f"layers.0.mlp.{name}.weight" for name in ("gate_up", "down")},
    "eagle3": {"fc.weight", "lm_head"}
    | {f"attention.{name}.weight" for name in ("qkv", "output")}
    | {f"mlp.{name}.weight" for name in ("gate_up", "down")},
    "mtp": {"fc.weight", "lm_head"}
    | {f"layer.attention.{name}.weight" for name in ("projection", "output")}
    | {f"layer.mlp.{name}.weight" for name in ("gate_up", "down")},
    "mtp with experts": {"fc.weight", "lm_head"}
    | {f"layer.attention.{name}.weight" for name in ("projection", "output")},
}


class Recording(ReferenceKernels):
    """Remembers the matrices that it packed, without keeping them."""

    def __init__(self) -> None:
        self.packed: list[weakref.ref[torch.Tensor]] = []

    def pack(self, weight: torch.Tensor) -> PlainWeight:
        packed = super().pack(weight.clone())
        self.packed.append(weakref.ref(packed.matrix))
        return packed


@pytest.fixture(params=HEADS)
def which(request) -> str:
    return request.param


def test_all_projections_of_a_head_become_fp8_and_nothing_else(tmp_path, which):
    files = HeadFiles(tmp_path, which)
    plain = files.head()
    head = files.head(quantization="fp8")
    before, after = dict(packed_in(plain)), dict(packed_in(head))
    assert before.keys() == after.keys() >= PROJECTIONS[which] | EMBEDDING
    rounded = {name for name, weight in after.items() if isinstance(weight, Fp8Weight)}
    assert rounded == PROJECTIONS[which]
    mixture = before.keys() - rounded - EMBEDDING
    assert bool(mixture) == (which == "mtp with experts")
    assert all(name.startswith("layer.mlp.") for name in mixture)
    for name in rounded:
        exact, weight = before[name].matrix, after[name]
        error = (weight.matrix.float() * weight.scale[:, None] - exact).norm() / exact.norm()
        assert 0.005 < error < 0.05


def test_the_target_s_weights_stay_as_they_are(tmp_path, which):
    files = HeadFiles(tmp_path, which)
    shared, own = files.target.embedding, files.target.head
    before = own.matrix.clone()
    head = files.head(quantization="fp8")
    assert files.target.embedding is shared
    assert files.target.head is own
    assert isinstance(own, PlainWeight)
    assert torch.equal(own.matrix, before)
    assert isinstance(head.embedding, PlainWeight)


def test_a_quantized_head_drafts(tmp_path, which):
    files = HeadFiles(tmp_path, which)
    plain, rounded = (files.bench(quantization=one) for one in (None, "fp8"))
    for bench in (plain, rounded):
        bench.run(5, VOCAB, lambda context, drafts: None)
        assert bench.counts.offered > 0
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    exact, got = (bench.drafter._head.compute_logits(x) for bench in (plain, rounded))
    # A matrix in e4m3 is 0.026 off, its mantissa of 3 bits rounded to nearest, and rows are too.
    assert 0.005 < (got - exact).norm() / exact.norm() < 0.06


def test_matrices_that_became_fp8_leave_memory(tmp_path, which):
    files = HeadFiles(tmp_path, which)
    kernels = Recording()
    head = files.head(kernels, quantization="fp8")
    alive = [one() for one in kernels.packed if one() is not None]
    kept = [weight.matrix for _, weight in packed_in(head) if isinstance(weight, PlainWeight)]
    assert len(kernels.packed) > len(alive)
    assert all(any(matrix is one for one in kept) for matrix in alive)

"""Which matrices of a draft head are in eight bits, and what becomes of the others."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import (
    HIDDEN,
    VOCAB,
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.drafting import CPU, MAX_LEN, Bench
from helpers.hybrids import FULL, write_hybrid
from helpers.packed import packed_in
from sametoken.config import SpeculativeConfig
from sametoken.drafters.build import Placement, load_drafter, required_aux_layers
from sametoken.kernels.gemm.eight_bit import EightBitWeight
from sametoken.kernels.gemm.reference import PlainWeight
from sametoken.kernels.reference import ReferenceKernels
from sametoken.models.loader import load_model, read_config

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


class Files:
    """A target and a head for it, loaded with and without ``quantization``."""

    def __init__(self, folder: Path, which: str) -> None:
        method = which.split()[0]
        model = None
        if method == "mtp":
            kind = "qwen3_5" if which == method else "qwen3_next"
            self.path = write_hybrid(folder, kind, layer_types=[FULL] * 4)
        else:
            self.path = write_llama(folder / "target")
            write, tensors = {
                "eagle": (write_eagle1, eagle1_tensors),
                "eagle3": (write_safeailab, head_tensors),
            }[method]
            model = str(write(folder / "head", tensors()))
        self.spec = SpeculativeConfig(method, 3, model)
        layers = required_aux_layers(self.spec, read_config(self.path), self.path)
        self.target = load_model(
            self.path,
            kernels=ReferenceKernels(),
            dtype=torch.float32,
            device=CPU,
            max_positions=MAX_LEN,
            aux_layers=layers,
        )

    def bench(self, quantization: str | None, kernels: ReferenceKernels) -> Bench:
        placement = Placement(
            kernels, torch.float32, CPU, 40, max_positions=MAX_LEN, target_path=self.path
        )
        loaded = load_drafter(replace(self.spec, quantization=quantization), self.target, placement)
        bench = Bench(self.target, 3, spoil=0.0)
        bench.drafter = loaded.attach(bench.allocate(loaded.kv_spec), bench.coupling)
        return bench


@pytest.fixture(params=HEADS)
def which(request) -> str:
    return request.param


def test_all_projections_of_a_head_are_in_eight_bits_and_nothing_else(tmp_path, which):
    files = Files(tmp_path, which)
    plain = files.bench(None, ReferenceKernels()).drafter._head
    head = files.bench("fp8", ReferenceKernels()).drafter._head
    before, after = dict(packed_in(plain)), dict(packed_in(head))
    assert before.keys() == after.keys() >= PROJECTIONS[which] | EMBEDDING
    rounded = {name for name, weight in after.items() if isinstance(weight, EightBitWeight)}
    assert rounded == PROJECTIONS[which]
    mixture = before.keys() - rounded - EMBEDDING
    assert bool(mixture) == (which == "mtp with experts")
    assert all(name.startswith("layer.mlp.") for name in mixture)
    for name in rounded:
        exact, weight = before[name].matrix, after[name]
        error = (weight.matrix.float() * weight.scale[:, None] - exact).norm() / exact.norm()
        assert 0.005 < error < 0.05


def test_the_target_s_weights_stay_as_they_are(tmp_path, which):
    files = Files(tmp_path, which)
    shared, own = files.target.embedding, files.target.head
    before = own.matrix.clone()
    head = files.bench("fp8", ReferenceKernels()).drafter._head
    assert files.target.embedding is shared
    assert files.target.head is own
    assert isinstance(own, PlainWeight)
    assert torch.equal(own.matrix, before)
    assert isinstance(head.embedding, PlainWeight)


def test_a_quantized_head_drafts(tmp_path, which):
    files = Files(tmp_path, which)
    plain, rounded = (files.bench(one, ReferenceKernels()) for one in (None, "fp8"))
    for bench in (plain, rounded):
        bench.run(5, VOCAB, lambda context, drafts: None)
        assert bench.counts.offered > 0
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    exact, got = (bench.drafter._head.compute_logits(x) for bench in (plain, rounded))
    # A matrix in e4m3 is 0.026 off, its mantissa of 3 bits rounded to nearest, and rows are too.
    assert 0.005 < (got - exact).norm() / exact.norm() < 0.06


def test_matrices_of_which_there_are_eight_bits_leave_memory(tmp_path, which):
    files = Files(tmp_path, which)
    kernels = Recording()
    head = files.bench("fp8", kernels).drafter._head
    alive = [one() for one in kernels.packed if one() is not None]
    kept = [weight.matrix for _, weight in packed_in(head) if isinstance(weight, PlainWeight)]
    assert len(kernels.packed) > len(alive)
    assert all(any(matrix is one for one in kept) for matrix in alive)

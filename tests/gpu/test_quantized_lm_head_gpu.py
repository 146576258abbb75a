"""Targets whose lm_head is quantized, on a chip, and the start-up check of their products."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import eagle1_tensors, write_eagle1
from helpers.quantized import write_with_lm_head
from helpers.updates import NGRAM, engine, said, same_weights, tensors_of
from sametoken.models.quantize import SCHEMES
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.weight import Fp8Matrix, Int4Matrix, Rounding

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
GPU = {"device": "cuda", "dtype": "bfloat16"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_speculation_changes_no_bit(tmp_path, scheme):
    (_, copy), (plain, other) = (
        write_with_lm_head(tmp_path, seed, scheme, **SIZES) for seed in (0, 1)
    )
    head = write_eagle1(tmp_path / "head", eagle1_tensors(**SIZES), **SIZES)
    eagle = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    wanted = said(engine(copy, **GPU))
    some = tmp_path / "map.json"
    some.write_text("[1, 3, 4, 9, 17, 21]")
    for spec in (NGRAM, eagle | {"token_map": str(some)}, eagle):
        llm = engine(copy, spec, **GPU)
        assert said(llm) == wanted
        assert llm.speculation_metrics.num_draft_tokens > 0
    weights = llm._engine.weights
    assert weights.drafter.model.lm_head is weights.model.head
    built = engine(other, eagle, **GPU)
    llm.update_weights(tensors_of(plain).items())
    assert same_weights(llm, built)
    assert said(llm) == said(built) != wanted


@pytest.mark.parametrize("rounding", [None, Rounding(), Rounding(grouped=True)])
@pytest.mark.parametrize("by_group", [False, True])
def test_the_check_passes_on_this_chip(by_group, rounding):
    kernels = select_kernels(torch.device("cuda"))
    kept = []
    for rows, columns in ((24_576, 4096), (4096, 12_288), (6144, 4096), (151_936, 4096)):
        values = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
        groups = (rows, columns // 128) if by_group else (rows,)
        scale = torch.rand(groups, device="cuda") / columns
        matrix = Fp8Matrix(values, scale, rounding)
        kept.append(kernels.pack_fp8(matrix, torch.bfloat16))
    counts = (1, 2, 4, 8, 16, 24, 48, 64, 128, 192, 256, 384, 448, 512, 1024, 2048)
    assert kernels.prove_quantized(counts, torch.bfloat16, torch.device("cuda")) == len(kept)


def expert(kernels, form: str, rows: int, columns: int):
    """A random matrix as ``pack_experts`` takes it."""
    if form == "bfloat16":
        return kernels.pack(torch.randn(rows, columns, device="cuda").bfloat16() / columns**0.5)
    if form == "float8":
        values = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.rand(rows, columns // 128, device="cuda") / columns
        return kernels.pack_fp8(Fp8Matrix(values, scale, Rounding(grouped=True)), torch.bfloat16)
    values = torch.randint(256, (rows, columns // 2), device="cuda", dtype=torch.uint8)
    scale = torch.rand(rows, columns // 32, device="cuda").bfloat16() / columns**0.5
    zero = None if form == "mxfp4" else torch.full_like(scale, 7, dtype=torch.uint8)
    scale = scale.to(torch.float8_e8m0fnu) if form == "mxfp4" else scale
    return kernels.pack_int4(Int4Matrix(values, scale, zero), torch.bfloat16)


@pytest.mark.parametrize("form", ["bfloat16", "float8", "4-bit", "mxfp4"])
def test_the_check_of_experts_passes_on_this_chip(form):
    kernels = select_kernels(torch.device("cuda"))
    gate_up, down = (
        [expert(kernels, form, *size) for _ in range(8)] for size in ((1536, 2048), (2048, 768))
    )
    experts = kernels.pack_experts(gate_up, down)
    del gate_up, down
    counts = (1, 16, 64, 256, 320, 512, 2048)
    assert kernels.prove_quantized(counts, torch.bfloat16, torch.device("cuda")) == 1
    assert experts.num_experts == 8

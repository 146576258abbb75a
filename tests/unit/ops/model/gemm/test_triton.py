"""The Triton GEMM under the interpreter: masks, tiles and epilogues.

The interpreter multiplies through numpy, whose order of additions follows the shape, so bits
across tiles are compared on small integers, where every sum is exact; with real numbers
tests/gpu/test_gemm_gpu.py compares them on the chip. numpy has no bf16: fp16 stands in.
"""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.poisoned import poisoned
from sametoken.ops.model.gemm import product as gemm
from sametoken.ops.model.gemm import selfcheck
from sametoken.ops.model.gemm.selfcheck import ProvenTable, Refusal, check_gemm
from sametoken.ops.model.gemm.tuning import (
    CANONICAL,
    CublasConfig,
    GemmShape,
    GemmTable,
    TritonConfig,
    default_config,
)
from sametoken.ops.triton import DeviceWeight

SMALL = TritonConfig(16, 16, 32, num_warps=4, num_stages=2)
TABLE = GemmTable()
SHAPE = GemmShape(24, 32)


def integers(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "features", "depth"), [(1, 16, 32), (5, 37, 72), (33, 50, 40)])
def test_linear_reads_nothing_outside_odd_shapes(rows, features, depth, dtype):
    x = poisoned(integers(rows, depth, dtype=dtype))
    matrix = poisoned(integers(features, depth, dtype=dtype, seed=1))
    expected = (x.double() @ matrix.double().T).to(dtype)
    assert torch.equal(DeviceWeight(matrix, TABLE).matmul(x), expected)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        TritonConfig(32, 16, 64, num_warps=4, num_stages=2),
        TritonConfig(16, 32, 32, num_warps=4, num_stages=2, tma=True),
        TritonConfig(64, 64, 32, num_warps=8, num_stages=3, tma=True),
        TritonConfig(16, 64, 16, num_warps=4, num_stages=4, tma=True),
        TritonConfig(32, 32, 128, num_warps=4, num_stages=2),
    ],
)
@pytest.mark.parametrize("epilogue", ["none", "bias", "silu_mul", "logits"])
def test_every_tile_and_load_form_gives_the_canonical_result(config, epilogue):
    x, matrix = integers(21, 80) / 16, integers(48, 80, seed=1)
    bias = integers(48, seed=2) if epilogue == "bias" else None
    expected = gemm.product(CANONICAL, x, matrix, epilogue, bias)
    assert torch.equal(gemm.product(config, x, matrix, epilogue, bias), expected)


def test_logits_are_not_rounded_to_the_activations_type():
    x, matrix = integers(3, 96), integers(40, 96, seed=1)
    x[0], matrix[0] = 6.0, 7.0
    x[0, 0] = 6.125
    got = DeviceWeight(matrix, TABLE).matmul(x, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got, (x.double() @ matrix.double().T).float())
    assert not torch.equal(got, got.half().float())


def test_bias_is_added_before_the_one_rounding():
    x, matrix = torch.full((1, 32), 8.0).half(), torch.full((16, 32), 8.0).half()
    matrix[:, 0] = 8.125
    bias = torch.full((16,), 0.5).half()
    # 2049 + 0.5 rounds to 2050 in fp16; 2049 alone would first round to 2048.
    got = DeviceWeight(matrix, TABLE).matmul(x, bias)
    assert torch.equal(got, torch.full((1, 16), 2050.0).half())


def test_fused_gate_equals_the_unfused_path():
    x, matrix = integers(5, 64) / 16, integers(2 * 24, 64, seed=1)
    weight = DeviceWeight(matrix, TABLE)
    fused = weight.gated_matmul(x)
    stored = weight.matmul(x)
    assert torch.equal(fused, gemm.silu_mul(stored))
    gate, up = stored.float().chunk(2, dim=-1)
    torch.testing.assert_close(
        fused, (torch.nn.functional.silu(gate) * up).half(), rtol=2e-3, atol=2e-3
    )


def test_rows_that_do_not_exist_are_not_written(monkeypatch):
    x, matrix = integers(3, 32), integers(20, 32, seed=1)
    memory = torch.full((64, 20), torch.nan, dtype=torch.float16)
    monkeypatch.setattr(gemm.torch, "empty", lambda *shape, **_: memory[: shape[0]])
    out = gemm.product(SMALL, x, matrix)
    assert torch.equal(out, (x.double() @ matrix.double().T).half())
    assert memory[3:].isnan().all()


def test_a_bias_that_the_epilogue_has_no_use_for_is_refused():
    bias = integers(16)
    with pytest.raises(AssertionError):
        gemm.product(SMALL, integers(1, 32), integers(16, 32), "none", bias)
    with pytest.raises(AssertionError):
        DeviceWeight(integers(16, 32), TABLE).matmul(integers(1, 32), bias, torch.float32)
    with pytest.raises(AssertionError):
        gemm.product(SMALL, integers(1, 32), integers(16, 32), "bias")


def test_selfcheck_keeps_what_agrees():
    table = GemmTable({SHAPE: {4: SMALL}})
    checked, report = check_gemm(integers(24, 32), "none", table, [1, 3, 4, 4])
    assert checked.choose(SHAPE, 3) == SMALL
    assert report.refused == ()


def test_selfcheck_drops_a_kernel_whose_bits_differ_at_one_row_count(monkeypatch):
    def splitting(config, x, matrix, epilogue, bias):
        out = gemm.product(config, x, matrix, epilogue, bias)
        return out + 1 if config == SMALL and x.shape[0] == 3 else out

    monkeypatch.setattr(selfcheck, "product", splitting)
    table = GemmTable({SHAPE: {4: SMALL, 8: SMALL}})
    checked, report = check_gemm(integers(24, 32), "none", table, [2, 3, 4, 6])
    assert report.refused == (Refusal(SMALL, (3,)),)
    assert checked.choose(SHAPE, 4) == default_config(SHAPE, 4, hopper=False)
    assert checked.choose(SHAPE, 8) == SMALL


def test_selfcheck_refuses_cublas_at_the_row_counts_that_differ(monkeypatch):
    def splitting(config, x, matrix, epilogue, bias):
        is_split = isinstance(config, CublasConfig) and x.shape[0] == 3
        return gemm.product(CANONICAL, x, matrix, epilogue, bias) + is_split

    monkeypatch.setattr(selfcheck, "product", splitting)
    table = ProvenTable(GemmTable({SHAPE: {4: CublasConfig()}}))
    table.choose(SHAPE, 4)
    (report,) = table.prove([integers(24, 32)], (2, 3, 4))
    assert report.refused == (Refusal(CublasConfig(), (3,)),)
    assert table.choose(SHAPE, 2) == table.choose(SHAPE, 4) == CublasConfig()
    assert table.choose(SHAPE, 3) == default_config(SHAPE, 3, hopper=False)


def test_selfcheck_proves_the_default_of_a_product_that_was_asked_for():
    matrix, table = integers(24, 32), ProvenTable(GemmTable(hopper=True))
    assert table.prove([matrix], (170, 180)) == ()
    in_order = table.choose(SHAPE, 170)
    assert isinstance(in_order, TritonConfig)
    (report,) = table.prove([matrix], (170, 180))
    assert report.shape == SHAPE
    assert table.choose(SHAPE, 170) == table.choose(SHAPE, 180) == CublasConfig()
    assert table.choose(SHAPE, 190) == in_order


def test_results_that_take_too_much_memory_are_not_compared(monkeypatch):
    monkeypatch.setattr(selfcheck, "MOST_COMPARED", 24 * 175)
    matrix, table = integers(24, 32), ProvenTable(GemmTable(hopper=True))
    in_order = table.choose(SHAPE, 180)
    table.prove([matrix], (170, 180))
    assert table.choose(SHAPE, 170) == CublasConfig()
    assert table.choose(SHAPE, 180) == in_order


def test_every_kernel_that_is_compared_has_run_before(monkeypatch):
    """So that start-up compiles them side by side."""
    table = ProvenTable(GemmTable({SHAPE: {4: SMALL, 8: CublasConfig()}}))
    table.choose(SHAPE, 4)
    ran = []

    def product(config, *given):
        ran.append(config)
        return gemm.product(CANONICAL, *given)

    monkeypatch.setattr(selfcheck, "product", product)
    table.run_candidates([integers(24, 32)], (3, 6, 70))
    first = set(ran)
    ran.clear()
    table.prove([integers(24, 32)], (3, 6, 70))
    assert first == set(ran) >= {SMALL, CANONICAL}


def test_selfcheck_falls_back_to_the_canonical_kernel(monkeypatch):
    def only_canonical(config, x, matrix, epilogue, bias):
        out = gemm.product(CANONICAL, x, matrix, epilogue, bias)
        return out if config == CANONICAL else out + 1

    monkeypatch.setattr(selfcheck, "product", only_canonical)
    for epilogue in ("none", "bias"):
        checked, report = check_gemm(integers(24, 32), epilogue, TABLE, [17])
        assert len(report.refused) == 2
        assert checked.choose(GemmShape(24, 32, epilogue), 17) == CANONICAL


@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "logits"])
def test_no_rows_give_no_rows(epilogue):
    out = gemm.product(SMALL, integers(0, 32), integers(24, 32), epilogue)
    assert out.shape == (0, 12 if epilogue == "silu_mul" else 24)


def test_a_weight_of_one_row_compiles(tmp_path):
    """The gate of a shared expert has one output."""
    code = """
from sametoken.ops.model.gemm.product import product
from sametoken.ops.model.gemm.tuning import CANONICAL
x, weight = (torch.zeros(rows, 128, dtype=torch.bfloat16) for rows in (2, 1))
assert product(CANONICAL, x, weight).shape == (2, 1)
"""
    compile_launches(code, tmp_path)

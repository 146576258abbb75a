"""The start-up check of quantized products: which are compared, and what is refused."""

from __future__ import annotations

import gc

import pytest
import torch

from sametoken.errors import UnsupportedError
from sametoken.ops.model.gemm import fp8_triton, selfcheck
from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.int4_triton import Int4DeviceWeight
from sametoken.ops.model.gemm.quantized_selfcheck import QuantizedCheck, prove_products
from sametoken.ops.model.gemm.selfcheck import require_row_law
from sametoken.ops.weight import BY_ROW, Int4Matrix, Rounding

CPU = torch.device("cpu")
COUNTS = (1, 3, 40, 64, 65, 200)


def weight_of(features: int, depth: int, rounding=BY_ROW) -> Fp8DeviceWeight:
    return Fp8DeviceWeight(
        torch.ones(features, depth).to(torch.float8_e4m3fn), torch.ones(features), rounding
    )


@pytest.fixture
def ran(monkeypatch):
    """Products whose rows are spoilt from a number of rows on, and the calls of each."""
    calls, spoilt = [], {}

    def product(x, weight, epilogue="none", bias=None, config=None):
        shape = (weight.out_features, weight.in_features, epilogue)
        calls.append((shape, x.shape[0]))
        rows = x.float().sum(1, keepdim=True).expand(-1, 3).clone()
        if x.shape[0] >= spoilt.get(shape, 10**6):
            rows[-1] += 2**-9
        return rows

    monkeypatch.setattr(fp8_triton, "product", product)
    return calls, spoilt


def test_each_form_is_compared_at_the_largest_row_count_of_each_bucket(ran):
    calls, _ = ran
    check = QuantizedCheck()
    kept = [check.watch(weight_of(64, 128)) for _ in range(2)]
    kept += [check.watch(weight_of(64, 128, how)) for how in (None, Rounding(grouped=True))]
    assert check.prove(COUNTS, torch.bfloat16, CPU) == 3
    whole = [rows for _, rows in calls if rows not in (8, 16)]
    assert whole == 3 * [1, 3, 64, 65, 200]
    assert len(kept) == 4
    assert {shape for shape, _ in calls} == {(64, 128, "logits")}


def test_results_that_take_too_much_memory_are_not_compared(ran, monkeypatch):
    monkeypatch.setattr(selfcheck, "MOST_COMPARED", 64 * 70)
    calls, _ = ran
    check = QuantizedCheck()
    kept = check.watch(weight_of(64, 128))
    assert check.prove(COUNTS, torch.bfloat16, CPU) == 1
    assert max(rows for _, rows in calls) == 65
    assert kept.out_features == 64


def test_products_before_a_gate_are_compared_too(ran):
    calls, _ = ran
    check = QuantizedCheck()
    kept = [check.watch(weight_of(*shape)) for shape in ((256, 64), (64, 128))]
    assert check.prove(COUNTS, torch.bfloat16, CPU) == len(kept)
    gated = {shape for shape, _ in calls if shape[2] == "silu_mul"}
    assert gated == {(256, 64, "silu_mul")}


@pytest.mark.parametrize("epilogue", ["logits", "silu_mul"])
def test_another_bit_among_many_rows_is_refused(ran, epilogue):
    _, spoilt = ran
    check = QuantizedCheck()
    kept = [check.watch(weight_of(*shape)) for shape in ((256, 64), (64, 128))]
    spoilt[(256, 64, epilogue)] = 65
    with pytest.raises(UnsupportedError, match=r"\[256, 64\] give .* among \[65, 200\] rows"):
        check.prove(COUNTS, torch.bfloat16, CPU)
    assert len(kept) == 2


def test_weights_that_are_gone_are_not_compared(ran):
    check = QuantizedCheck()
    weight = check.watch(weight_of(64, 128))
    del weight
    gc.collect()
    assert check.prove(COUNTS, torch.bfloat16, CPU) == 0


def test_a_form_is_compared_while_one_weight_of_it_is_in_use(ran):
    check = QuantizedCheck()
    first, second = (check.watch(weight_of(64, 128)) for _ in range(2))
    del first
    gc.collect()
    assert check.prove(COUNTS, torch.bfloat16, CPU) == 1
    assert second.out_features == 64


def test_four_bit_weights_are_compared_by_form_and_expanded_by_shape():
    check = QuantizedCheck()
    values = torch.zeros(3, 64, dtype=torch.uint8)
    scale, zero = torch.ones(3, 4), torch.full((3, 4), 7, dtype=torch.uint8)
    matrices = (Int4Matrix(values, scale, zero), Int4Matrix(values, scale, None))
    kept = [check.watch(Int4DeviceWeight.of(one)) for one in (*matrices, *matrices)]
    assert check.prove((1, 2), torch.bfloat16, CPU) == 2
    (panels,) = check.four_bit_matrices()
    assert (panels.out_features, panels.in_features) == (3, 128)
    assert len(kept) == 4


def test_a_matrix_with_factors_is_not_expanded_for_cublas_and_hides_none_that_is():
    check, codes = QuantizedCheck(), torch.zeros(3, 64, dtype=torch.uint8)
    nvfp4 = Int4Matrix(codes, torch.ones(3, 8).to(torch.float8_e4m3fn), None, None, torch.ones(3))
    kept = [check.watch(Int4DeviceWeight.of(nvfp4))]
    assert check.four_bit_matrices() == []
    plain = Int4Matrix(codes, torch.ones(3, 4), None)
    kept += [check.watch(Int4DeviceWeight.of(one)) for one in (plain, nvfp4)]
    assert [one.factors for one in check.four_bit_matrices()] == [None]
    assert len(kept) == 3


def test_rows_are_those_of_small_calls():
    x = torch.arange(40.0)
    seen = []

    def run(rows: slice) -> torch.Tensor:
        seen.append(x[rows].shape[0])
        return x[rows]

    require_row_law("these", run, (40, 2))
    assert seen == [16, 16, 8, 2, 40]


class Packed:
    """As a weight in 4 bits, with other bits from 129 rows on."""

    out_features, in_features = 3, 32

    def matmul(self, x, bias=None, out_dtype=None):
        return x[:, :3].float() + (2**-9 if x.shape[0] > 128 else 0)


def test_few_and_many_rows_by_four_bits_are_compared():
    counts = (1, 64, 128, 200)
    prove_products("4-bit", [Packed()], counts[:3], torch.bfloat16, CPU)
    with pytest.raises(UnsupportedError, match=r"4-bit products of \[3, 32\] .* \[200\] rows"):
        prove_products("4-bit", [Packed()], counts, torch.bfloat16, CPU)

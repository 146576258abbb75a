"""Norms in Triton against their references, in poisoned memory."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches, orders_of_sums
from helpers.poisoned import DEVICE, close, noise, poisoned
from sametoken.ops.model import norm_rope as reference
from sametoken.ops.model import norm_triton as norm
from sametoken.ops.model.gemm import fp8_triton
from sametoken.ops.weight import BY_ROW, Rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 99), (5, 576)])
def test_rms_norm(rows, width, dtype):
    x, weight = noise(rows, width, dtype=dtype), noise(width, dtype=dtype, seed=1)
    before = x.clone()
    normed = norm.rms_norm(x, weight, 1e-5)
    close(normed, reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)
    for wider in (64, 41):
        other = noise(rows, wider, dtype=dtype)
        for part in (torch.cat((x, other), 1)[:, :width], torch.cat((other, x), 1)[:, wider:]):
            assert torch.equal(norm.rms_norm(part, weight, 1e-5), normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_rms_norm_rounds_the_residual_once_and_works_in_place(dtype):
    x, residual = noise(4, 99, dtype=dtype), noise(4, 99, dtype=dtype, seed=1)
    weight = noise(99, dtype=dtype, seed=2)
    expected, total = reference.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    normed, summed = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, total)
    assert summed.data_ptr() == residual.data_ptr()
    close(normed, expected)
    # What is normed is the rounded sum: a product that added the residual gives these bits too.
    assert torch.equal(normed, norm.rms_norm(poisoned(total), weight, 1e-6))


ROUNDINGS = (BY_ROW, Rounding(grouped=True), Rounding(grouped=True, powers=True))


def hostile(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of noise, zeros, NaN or an infinity in one place, one huge element, and tiny ones."""
    x = noise(7, width, dtype=dtype)
    x[1] = 0
    x[2, width // 2], x[3, width - 1], x[4, 0] = torch.nan, torch.inf, 3e4
    x[5] *= 2.0**-14
    return x


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide|All-NaN).* encountered")
@pytest.mark.parametrize(
    "residual_of",
    [lambda x: None, lambda x: noise(*x.shape, dtype=x.dtype, seed=5), torch.zeros_like],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 64, 99, 576, 1500])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_norm_that_rounds_is_the_norm_and_then_the_rounding(rounding, width, dtype, residual_of):
    x, weight = hostile(width, dtype), noise(width, dtype=dtype, seed=1)
    residual, before = residual_of(x), x.clone()
    if residual is None:
        normed, total = norm.rms_norm(x, weight, 1e-6), x
    else:
        normed, total = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    values, scale = fp8_triton.rounded(normed, rounding)
    rows, summed = norm.rounding_rms_norm(x, residual, weight, 1e-6, rounding)
    assert torch.equal(rows.values.view(torch.uint8), values.view(torch.uint8))
    if rounding.grouped:
        # Groups of NaN alone have any scale.
        some = ~normed.isnan().any(1)
        scale, found = scale[some], rows.scale[some]
    else:
        found = rows.scale
    assert torch.equal(found.view(torch.uint8), scale.view(torch.uint8))
    assert rows.dtype == dtype
    assert summed is (x if residual is None else residual)
    assert torch.equal(summed.view(torch.uint8), total.view(torch.uint8))
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))
    assert normed.isnan().any(1).tolist()[1:4] == [False, True, True]
    nothing, _ = norm.rounding_rms_norm(x[:0], None, weight, 1e-6, rounding)
    assert nothing.shape == (0, width)


@pytest.mark.parametrize(("rounding", "num_scales"), zip(ROUNDINGS, (3, 6, 6), strict=True))
def test_a_norm_that_rounds_writes_its_rows_and_no_more(rounding, num_scales, monkeypatch):
    x, weight = noise(3, 131, dtype=torch.float16), noise(131, dtype=torch.float16, seed=1)
    expected, _ = norm.rounding_rms_norm(x, None, weight, 1e-6, rounding)
    memory = {
        dtype: torch.full((512,), torch.nan, device=DEVICE).to(dtype)
        for dtype in (torch.float8_e4m3fn, torch.float32)
    }

    def carved(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        shape = torch.Size(size)
        return memory[dtype][64 : 64 + shape.numel()].view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda x, dtype: carved(x.shape, dtype))
        patch.setattr(torch, "empty", lambda shape, dtype, device: carved(shape, dtype))
        rows, _ = norm.rounding_rms_norm(x, None, weight, 1e-6, rounding)
    assert rows.values.data_ptr() == memory[torch.float8_e4m3fn].data_ptr() + 64
    assert torch.equal(rows.values.float(), expected.values.float())
    assert torch.equal(rows.scale, expected.scale)
    for part, count in ((rows.values, 3 * 131), (rows.scale, num_scales)):
        outside = torch.cat((memory[part.dtype][:64], memory[part.dtype][64 + count :]))
        assert outside.float().isnan().all()


BOTH_NORMS = """
from sametoken.ops.model import norm_triton as norm
from sametoken.ops.weight import Rounding
x, residual, (weight, _) = (torch.zeros(2, {width}, dtype=torch.bfloat16) for _ in range(3))
norm.{call}
"""


def order_of_the_sum(cache, code: str):
    cache.mkdir()
    compile_launches(code, cache)
    ((order,),) = orders_of_sums(cache, "_rms_norm_kernel")
    return order


@pytest.mark.parametrize(
    ("plain", "rounding"),
    [
        ("rms_norm(x, weight, 1e-6)", "rounding_rms_norm(x, None, weight, 1e-6)"),
        ("add_rms_norm(x, residual, weight, 1e-6)", "rounding_rms_norm(x, residual, weight, 1e-6)"),
        ("rms_norm(x, weight, 1e-6)", "rounding_rms_norm(x, None, weight, 1e-6, Rounding(True))"),
        (
            "add_rms_norm(x, residual, weight, 1e-6)",
            "rounding_rms_norm(x, residual, weight, 1e-6, Rounding(True))",
        ),
    ],
)
@pytest.mark.parametrize("width", [4096, 3000])
def test_a_norm_that_rounds_adds_in_the_order_of_one_that_does_not(
    tmp_path, width, plain, rounding
):
    """A thread that stores 16 elements of 8 bits would load 16 and add those to each other."""
    codes = [BOTH_NORMS.format(width=width, call=call) for call in (plain, rounding)]
    registers, *others = order_of_the_sum(tmp_path / "plain", codes[0])
    assert registers[:4] == (1, 2, 4, 8 * 32 * 8)
    assert order_of_the_sum(tmp_path / "rounding", codes[1]) == (registers, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 64), (3, 5, 99), (2, 32, 8)])
def test_gated_rms_norm_and_fp32_weights(rows, heads, width, dtype):
    """The gate is a part of a wider projection."""
    x = noise(rows, heads * width, dtype=dtype)
    gate = noise(rows, heads * width + 7, dtype=dtype, seed=1)[:, 3:-4]
    weight = noise(width, seed=2)
    expected = reference.gated_rms_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-5).to(DEVICE)
    actual = norm.gated_rms_norm(x, gate, weight, 1e-5)
    close(actual, expected)
    by_head = (x.view(-1, width), gate.reshape(-1, width))
    heads_alone = reference.gated_rms_norm(*(t.cpu() for t in by_head), weight.cpu(), 1e-5)
    close(heads_alone.view(x.shape).to(DEVICE), expected)
    last = norm.gated_rms_norm(x[-1:].clone(), gate[-1:].clone(), weight, 1e-5)
    assert torch.equal(last, actual[-1:])


def test_norm_rows_know_nothing_of_each_other():
    x, residual, weight = noise(9, 99), noise(9, 99, seed=1), noise(99, seed=2)
    alone = [
        norm.add_rms_norm(x[i : i + 1].clone(), residual[i : i + 1].clone(), weight, 1e-6)[0]
        for i in range(9)
    ]
    together = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)[0]
    assert torch.equal(torch.cat(alone), together)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    moved = norm.add_rms_norm(x[order], residual[order], weight, 1e-6)[0]
    assert torch.equal(moved, together[order])


NORMS = """
from sametoken.ops.model import norm_triton as norm
wide, (weight, _) = torch.zeros(2, 2112, dtype=torch.bfloat16), torch.zeros(2, {width}).bfloat16()
norm.rms_norm({rows}, weight, 1e-6)
"""


@pytest.mark.parametrize("width", [512, 1536])
def test_rows_that_lie_apart_are_added_in_the_order_of_others(tmp_path, width):
    alike, apart = (
        order_of_the_sum(tmp_path / name, NORMS.format(width=width, rows=rows.format(width)))
        for name, rows in (("alike", "wide[:, :{}].contiguous()"), ("apart", "wide[:, :{}]"))
    )
    assert alike == apart


def test_no_rows():
    assert norm.rms_norm(noise(0, 64), noise(64), 1e-5).shape == (0, 64)

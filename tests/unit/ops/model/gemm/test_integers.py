"""The reference of products with activations in 8 bits, against what it stands for."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops.model.gemm.int4 import expanded
from sametoken.ops.model.gemm.integers import WIDTH, product, rounded_to_int8
from sametoken.ops.weight import IntegerMatrix


def test_halves_are_rounded_to_even_and_the_largest_becomes_127():
    x = torch.zeros(2, 40)
    x[0, :6] = torch.tensor([127.0, 0.5, 1.5, -2.5, 126.5, -0.4])
    x[1, 33] = -3.0
    codes, scale = rounded_to_int8(x)
    assert codes[0, 0, :6].tolist() == [127, 0, 2, -2, 126, 0]
    assert codes[1, 1].tolist() == [0, -127] + [0] * 30
    assert scale[0, 0, 0] == 1
    assert torch.equal(scale[1, 1, 0], torch.tensor(3.0) / torch.tensor(127.0))
    assert not codes[1, 0].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_that_is_not_finite_has_a_scale_of_nan(bad):
    x = torch.ones(1, 64)
    x[0, 40] = bad
    codes, scale = rounded_to_int8(x)
    assert scale.isnan().flatten().tolist() == [False, True]
    assert (codes[0, 0] == 127).all()
    assert not codes[0, 1].any()


@pytest.mark.parametrize(
    ("bits", "width", "minima"), [(4, 32, False), (4, 32, True), (6, 16, False), (8, 32, False)]
)
def test_the_product_is_that_of_the_rounded_activations(bits, width, minima):
    generator, shape = torch.Generator().manual_seed(0), (19, 160 // width)
    codes = torch.randint(0, 2**bits, (19, 160), generator=generator, dtype=torch.uint8)
    scale, minimum = torch.rand(2, *shape, generator=generator)
    given = (0, minimum) if minima else (1 << bits - 1, None)
    matrix = IntegerMatrix(codes, bits, scale, *given)
    x = torch.randn(7, 160, generator=generator)
    integers, scales = rounded_to_int8(x)
    meant = (integers * scales).flatten(1)
    step = x.unflatten(1, (-1, WIDTH)).abs().amax(2).repeat_interleave(WIDTH, 1) / 127
    assert ((meant - x).abs() <= 0.51 * step).all()
    exact = meant.double() @ expanded(matrix).double().T
    torch.testing.assert_close(product(x, matrix).double(), exact, rtol=1e-5, atol=1e-3)

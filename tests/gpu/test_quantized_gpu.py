"""Products of quantized checkpoints on a chip: the reference, and bits at every row count."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops.backend import Routing
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.int4 import Int4Weight, packed_int4
from sametoken.ops.model.gemm.int4_triton import Int4DeviceWeight
from sametoken.ops.model.moe_gate_triton import moe_gate
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.weight import Int4Matrix, Rounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
ROWS = (1, 2, 5, 16, 17, 33, 64, 65, 130, 300)
ROUNDINGS = {
    "row": Rounding,
    "groups": lambda: Rounding(grouped=True),
    "fixed": lambda: Rounding(scale=torch.tensor(0.02, device=CUDA)),
    "none": lambda: None,
}


def normal(*shape: int, seed: int = 0, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device=CUDA, generator=generator).to(dtype)


def float8_parts(by_group: bool, *shape: int):
    values = normal(*shape, seed=1, dtype=torch.float32).to(torch.float8_e4m3fn)
    groups = (*shape[:-1], -(-shape[-1] // 128)) if by_group else shape[:-1]
    scale = torch.rand(groups, device=CUDA, generator=torch.Generator("cuda").manual_seed(2))
    return values, (scale + 0.1) / shape[-1] ** 0.5


def require_row_law(weight, plain, depth: int, bound: float, dtype=torch.bfloat16) -> None:
    x = normal(max(ROWS), depth, dtype=dtype)
    whole, gated = weight.matmul(x, out_dtype=torch.float32), weight.gated_matmul(x)
    expected = plain.matmul(x[:64], out_dtype=torch.float32)
    assert (whole[:64] - expected).norm() / expected.norm() < bound
    for rows in ROWS:
        part = x[:rows].clone()
        assert torch.equal(weight.matmul(part, out_dtype=torch.float32), whole[:rows]), rows
        assert torch.equal(weight.gated_matmul(part), gated[:rows]), rows
    last = x[-1:].clone()
    assert torch.equal(weight.matmul(last, out_dtype=torch.float32), whole[-1:])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("features", "depth"), [(6144, 4096), (400, 1544)])
def test_float8_products_have_the_row_law(features, depth, by_group, rounding):
    values, scale = float8_parts(by_group, features, depth)
    given = (values, scale, ROUNDINGS[rounding]())
    require_row_law(Fp8DeviceWeight(*given), Fp8Weight(*given), depth, 2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_four_bit_products_have_the_row_law(width, dtype):
    features, depth = 1536, 4096
    generator = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 16, shape, device=CUDA, generator=generator).to(torch.uint8)

    groups = (features, depth // width)
    scale = torch.rand(groups, device=CUDA, generator=generator).half() / 64
    order = torch.randperm(depth, device=CUDA, generator=generator)
    values = packed_int4(random(features, depth), width)
    matrix = Int4Matrix(values, scale, random(*groups), order)
    require_row_law(Int4DeviceWeight(matrix), Int4Weight(matrix), depth, 1e-5, dtype)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("rounding", ["row", "groups", "none"])
def test_float8_experts_have_the_row_law(by_group, rounding):
    count, hidden, inner = 16, 2048, 512
    how = ROUNDINGS[rounding]()
    first, second = (
        float8_parts(by_group, count, *shape) for shape in ((2 * inner, hidden), (hidden, inner))
    )
    stacked = StackedExperts(first[0], second[0], first[1], second[1], how, how)
    x, logits = normal(300, hidden, seed=4), normal(300, count, seed=5)
    chosen, weights = moe_gate(logits, Routing(4, True))
    whole = stacked(x, chosen, weights)
    assert whole.isfinite().all()
    for rows in (1, 2, 17, 64, 257):
        parts = (x[:rows].clone(), chosen[:rows].clone(), weights[:rows].clone())
        assert torch.equal(stacked(*parts), whole[:rows])

"""Float8 products with scales of groups: operands, and what a kernel gives for them."""

from __future__ import annotations

import torch

from sametoken.ops.model.gemm import fp8
from sametoken.ops.model.gemm.triton import Scaling
from sametoken.ops.weight import Rounding

GROUPED = Rounding(grouped=True)


def operands(rows: int, features: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, Scaling]:
    """Rounded rows, a matrix and scales."""
    drawn = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(count, depth, generator=drawn) for count in (rows, features))
    values, row_scales = fp8.rounded_by(GROUPED, x)
    scales = torch.rand(-(-features // 128), row_scales.shape[1], generator=drawn) + 0.5
    scales = scales.repeat_interleave(128, dim=0)[:features].contiguous()
    scaling = Scaling(scales, row_scales.contiguous(), torch.bfloat16)
    return values, matrix.to(torch.float8_e4m3fn), scaling


def sums_of(values: torch.Tensor, matrix: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Of each 128 elements exactly, added in order, with one rounding for a product and a sum."""
    sums = torch.zeros(len(values), len(matrix))
    for group, (x, w) in enumerate(zip(values.split(128, 1), matrix.split(128, 1), strict=True)):
        products = (x.double() @ w.double().T).float()
        factors = scaling.rows[:, group, None] * scaling.features[None, :, group]
        sums = (products.double() * factors.double() + sums.double()).float()
    return sums

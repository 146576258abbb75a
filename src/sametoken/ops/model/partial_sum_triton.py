"""The sum of tensor-parallel partial products in Triton."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_BLOCK = 1024


def partial_sum(partials: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """[size, T, N] fp32 -> [T, N]; see ``Kernels.partial_sum``."""
    assert partials.dtype == torch.float32
    assert partials.is_contiguous()
    size, rows, width = partials.shape
    assert bias is None or bias.shape == (width,)
    out = torch.empty(rows, width, dtype=dtype, device=partials.device)
    if rows:
        _partial_sum_kernel[(rows, triton.cdiv(width, _BLOCK))](
            partials,
            bias,
            out,
            rows,
            SIZE=size,
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_options(partials),
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _partial_sum_kernel(
    partials,  # [SIZE, rows, WIDTH]
    bias,  # [WIDTH] or None
    out,  # [rows, WIDTH]
    rows,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.load(partials + row * WIDTH + columns, inside, other=0.0)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(partials + (row + rank * rows) * WIDTH + columns, inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), inside)

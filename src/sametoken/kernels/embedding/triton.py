"""Embedding lookup in Triton; its reference is ``kernels.gemm.reference.embedding``."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.overlap import overlapped, wait_for_earlier

_BLOCK = 1024


@triton.jit
def _embedding_kernel(
    token_ids,  # [T]
    matrix,  # [V, WIDTH]
    out,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    token_id = tl.load(token_ids + row)
    value = tl.load(matrix + token_id * WIDTH + columns, inside)
    tl.store(out + row * WIDTH + columns, value, inside)


def embedding(token_ids: Tensor, matrix: Tensor) -> Tensor:
    """Rows of the matrix: [T] int64 ids of [V, K] -> [T, K]."""
    assert matrix.is_contiguous()
    assert token_ids.is_contiguous()
    num_rows, width = token_ids.shape[0], matrix.shape[1]
    out = matrix.new_empty(num_rows, width)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _embedding_kernel[grid](
            token_ids, matrix, out, WIDTH=width, BLOCK=_BLOCK, num_warps=4, **overlapped(matrix)
        )
    return out

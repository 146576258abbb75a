"""Products of every head's rows with the head's own matrix, on a GPU.

K is added in order in tiles of one depth, so a row's bits depend on neither the number of rows nor
the tile that they lie in.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.latent_attention.reference import PlainHeadWeights
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_DEPTH = 64
_MOST_ROWS = 128

#: Rows from which tiles have twice the features.
MANY_ROWS = 1024


class DeviceHeadWeights(PlainHeadWeights):
    """``HeadWeights`` on a GPU."""

    __slots__ = ()

    def matmul(self, x: Tensor, out: Tensor) -> None:
        """See ``HeadWeights.matmul``."""
        head_products(x, self.matrices, out)


def head_products(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """See ``HeadWeights.matmul``; matrices are [H, N, K]."""
    heads, features, depth = matrices.shape
    num_rows = x.shape[:-2].numel()
    assert x.shape == (*out.shape[:-2], heads, depth)
    assert out.shape[-2:] == (heads, features)
    assert x.dtype == matrices.dtype == out.dtype
    assert x.stride(-1) == out.stride(-1) == 1
    if not num_rows:
        return
    rows = min(max(16, triton.next_power_of_2(num_rows)), _MOST_ROWS)
    tile, warps = (128, 8) if num_rows >= MANY_ROWS else (64, 4)
    tiles = triton.cdiv(num_rows, rows) * triton.cdiv(features, tile)
    in_blocks = x.dim() == 4
    _head_products_kernel[(tiles, heads)](
        x,
        matrices,
        out,
        num_rows,
        *x.stride()[-3:-1],
        *matrices.stride(),
        *out.stride()[-3:-1],
        x.stride(0),
        out.stride(0),
        BLOCK_LEN=x.shape[1] if in_blocks else 0,
        N=features,
        K=depth,
        BLOCK_ROWS=rows,
        BLOCK_FEATURES=tile,
        BLOCK_DEPTH=_DEPTH,
        num_warps=warps,
        num_stages=3,
        **pdl_options(x),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _head_products_kernel(
    x,  # [T, H, K] or [B, BLOCK_LEN, H, K], strided
    matrices,  # [H, N, K], strided
    out,  # as x, of N elements
    num_rows,
    x_row,
    x_head,
    w_head,
    w_feature,
    w_depth,
    out_row,
    out_head,
    x_block,
    out_block,
    BLOCK_LEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    # Neighbouring programs share a tile of the matrix.
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(0) // row_tiles * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    depth = tl.arange(0, BLOCK_DEPTH)
    x_at = x + head * x_head + _row_at(row, x_row, x_block, BLOCK_LEN)[:, None] + depth[None, :]
    w_at = matrices + head * w_head + feature[:, None] * w_feature + depth[None, :] * w_depth
    acc = tl.zeros([BLOCK_FEATURES, BLOCK_ROWS], tl.float32)
    for k in tl.range(0, K, BLOCK_DEPTH):
        inside = (k + depth < K)[None, :]
        w = tl.load(w_at + k * w_depth, mask=(feature < N)[:, None] & inside, other=0.0)
        a = tl.load(x_at + k, mask=(row < num_rows)[:, None] & inside, other=0.0)
        acc = tl.dot(w, a.T, acc, input_precision="ieee")
    row_at = _row_at(row, out_row, out_block, BLOCK_LEN)
    at = out + head * out_head + row_at[None, :] + feature[:, None]
    stored = (row < num_rows)[None, :] & (feature < N)[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _row_at(row, stride, block_stride, BLOCK_LEN: tl.constexpr):
    """Elements before a row."""
    row = row.to(tl.int64)
    if BLOCK_LEN == 0:
        return row * stride
    else:
        return row // BLOCK_LEN * block_stride + row % BLOCK_LEN * stride

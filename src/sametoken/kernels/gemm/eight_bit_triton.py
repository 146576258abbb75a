"""Logits with eight-bit weights on a GPU: weights e4m3, activations fp16, sums fp32.

As in ``gemm.triton`` no choice of tiles changes a bit: the sum over in_features is not split
and runs in order (tests/gpu/test_eight_bit_gpu.py).
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.gemm.eight_bit import EightBitWeight
from sametoken.kernels.overlap import overlapped, wait_for_earlier

#: Columns that change places in a tile, the same in weights and activations, so that a thread
#: finds its eight-bit operands of the matrix unit side by side.
GROUP = 64

#: From so many features on programs come in many waves, and shallow pipelines suffice.
WIDE = 100_000


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles and launch; none of it changes a bit of the result.

    Attributes:
        block_rows: activation rows per program.
        block_features: weight rows per program.
        block_depth: elements of the sum per loop turn, a multiple of ``GROUP``.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
    """

    block_rows: int
    block_features: int
    block_depth: int
    num_warps: int
    num_stages: int


def default_tiles(out_features: int, rows: int) -> Tiles:
    """The fastest that were measured (``benchmarks/eight_bit_gpu.py``)."""
    is_wide = out_features >= WIDE
    if rows <= 16:
        return Tiles(16, 128, 128, num_warps=4, num_stages=3 if is_wide else 5)
    if rows <= 32:
        return Tiles(32, 128, 128, num_warps=4, num_stages=3 if is_wide else 4)
    return Tiles(64, 128, 128, num_warps=8, num_stages=4)


def logits(x: Tensor, weight: EightBitWeight, tiles: Tiles | None = None) -> Tensor:
    """``eight_bit.logits`` on a GPU: [L, K] -> [L, V] fp32.

    Args:
        x: [L, K], contiguous.
        weight: [V, K].
        tiles: by default those of ``default_tiles``.
    """
    rows, in_features = x.shape
    out_features = weight.out_features
    assert x.is_contiguous()
    assert weight.matrix.is_contiguous()
    assert in_features == weight.in_features
    out = torch.empty(rows, out_features, dtype=torch.float32, device=x.device)
    if not rows:
        return out
    tiles = tiles or default_tiles(out_features, rows)
    row_tiles = triton.cdiv(rows, tiles.block_rows)
    _logits_kernel[(row_tiles * triton.cdiv(out_features, tiles.block_features),)](
        x,
        weight.matrix,
        weight.scale,
        out,
        rows,
        out_features,
        in_features,
        EVEN_DEPTH=in_features % tiles.block_depth == 0,
        GROUP=GROUP,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_FEATURES=tiles.block_features,
        BLOCK_DEPTH=tiles.block_depth,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlapped(x),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _logits_kernel(
    x,  # [rows, in_features]
    weight,  # [out_features, in_features]
    scale,  # [out_features]
    out,  # [rows, out_features]
    rows,
    out_features,
    in_features,
    OVERLAP: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    # Neighbouring programs share a weight tile, so that it leaves memory once.
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    first_row = (tl.program_id(0) % row_tiles) * BLOCK_ROWS
    first_feature = (tl.program_id(0) // row_tiles) * BLOCK_FEATURES
    row = first_row + tl.arange(0, BLOCK_ROWS)
    feature = first_feature + tl.arange(0, BLOCK_FEATURES)
    depth = tl.arange(0, BLOCK_DEPTH)
    present = feature < out_features
    wait_for_earlier(OVERLAP)

    acc = tl.zeros([BLOCK_FEATURES, BLOCK_ROWS], tl.float32)
    x_at = x + row.to(tl.int64)[:, None] * in_features + depth[None, :]
    w_at = weight + feature.to(tl.int64)[:, None] * in_features + depth[None, :]
    for k in tl.range(0, in_features, BLOCK_DEPTH):
        inside = (k + depth < in_features)[None, :]
        x_tile = _tile(x_at + k, (row < rows)[:, None], inside, EVEN_DEPTH).to(tl.float32)
        # The largest fp16 is 65504.
        halves = tl.clamp(x_tile, -65504.0, 65504.0).to(tl.float16)
        w_tile = _tile(w_at + k, present[:, None], inside, EVEN_DEPTH)
        w_tile = _regrouped(w_tile, GROUP).to(tl.float16)
        acc = tl.dot(w_tile, _regrouped(halves, GROUP).T, acc)

    acc *= tl.load(scale + feature, mask=present, other=0.0)[:, None]
    at = row.to(tl.int64)[None, :] * out_features + feature[:, None]
    tl.store(out + at, acc, mask=(row < rows)[None, :] & present[:, None])


@triton.jit
def _tile(at, there, inside, EVEN_DEPTH: tl.constexpr):
    """What is at these addresses, [n, depth], zero where nothing is."""
    mask = there if EVEN_DEPTH else there & inside
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _regrouped(tile, GROUP: tl.constexpr):
    """[n, depth] with the columns of each group in another order.

    A thread of the matrix unit takes columns 2t, 2t + 1, 2t + 8, 2t + 9, 2t + 16 .. of a group;
    here these are the neighbours 16t, 16t + 1, 16t + 2 .. of memory.
    """
    groups: tl.constexpr = tile.shape[1] // GROUP
    split = tile.reshape(tile.shape[0], groups, 4, GROUP // 8, 2)
    return split.permute(0, 1, 3, 2, 4).reshape(tile.shape[0], tile.shape[1])

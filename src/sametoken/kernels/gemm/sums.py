"""The sums of a product's tile over in_features, in order, and what is asked for before them."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.kernels.overlap import ask_l2, release_next, wait


@triton.jit
def sums(
    x_tiles,
    first_row,
    x_at,  # [rows, depth] pointers
    row_present,
    w_tiles,
    first_feature,
    w_at,  # [features, depth] pointers
    present,
    half,
    out_features,
    in_features,
    EPILOGUE: tl.constexpr,
    OVERLAP: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
):
    """The tile's sums over in_features, and for silu_mul those of up: [features, rows] fp32.

    WEIGHTS_FIRST fills the pipeline of loads before the kernel in front has finished. The
    pipeline takes up what is loaded and multiplied in one turn: weights, then, for activations
    come through registers, a turn ahead. The wait stands in the first turn, behind the weights
    of all stages (tests/unit/kernels/test_overlap.py).
    """
    DEPTH: tl.constexpr = w_at.shape[1]
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([w_at.shape[0], x_at.shape[0]], tl.float32)
    up = tl.zeros([w_at.shape[0], x_at.shape[0]], tl.float32)
    if WEIGHTS_FIRST:
        x_tile = tl.zeros([x_at.shape[0], DEPTH], x_at.dtype.element_ty)
    for k in tl.range(0, in_features, DEPTH):
        inside = k + depth < in_features
        if WEIGHTS_FIRST:
            if k == 0:
                wait(OVERLAP)
                x_tile = _tile(None, 0, x_at, k, row_present, inside, EVEN_DEPTH)
            next_inside = k + DEPTH + depth < in_features
            x_next = _tile(None, 0, x_at, k + DEPTH, row_present, next_inside, False)
        else:
            x_tile = _tile(x_tiles, first_row, x_at, k, row_present, inside, EVEN_DEPTH)
        w_tile = _tile(w_tiles, first_feature, w_at, k, present, inside, EVEN_DEPTH)
        acc = _with_products(acc, w_tile, x_tile)
        if EPILOGUE == "silu_mul":
            first_up = out_features + first_feature
            w_tile = _tile(w_tiles, first_up, w_at + half, k, present, inside, EVEN_DEPTH)
            up = _with_products(up, w_tile, x_tile)
        if WEIGHTS_FIRST:
            x_tile = x_next
    return acc, up


@triton.jit
def _tile(tiles, first, at, k, present, inside, EVEN_DEPTH: tl.constexpr):
    """Rows that are present, [rows, depth]; the rest of the tile is zero and adds nothing."""
    if tiles is not None:
        return tiles.load([first, k])
    if EVEN_DEPTH:
        return tl.load(at + k, mask=present[:, None], other=0.0)
    return tl.load(at + k, mask=present[:, None] & inside[None, :], other=0.0)


@triton.jit
def _with_products(acc, w_tile, x_tile):
    """``acc + w_tile @ x_tile.T``: [features, rows] fp32."""
    if w_tile.dtype == tl.float8e4nv:
        # Hopper keeps some 14 bits of a sum of fp8 products: that of one tile alone.
        return acc + tl.dot(w_tile, x_tile.T)
    return tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")


@triton.jit
def start_early(
    w_row,
    half,
    EPILOGUE: tl.constexpr,
    RELEASE: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Ask for weights while the kernel in front still computes the activations."""
    release_next(RELEASE)
    if PREFETCH_BYTES:
        _prefetch(w_row, PREFETCH_BYTES, PIECES)
        if EPILOGUE == "silu_mul":
            _prefetch(w_row + half, PREFETCH_BYTES, PIECES)


@triton.jit
def _prefetch(w_row, BYTES: tl.constexpr, PIECES: tl.constexpr):
    """Ask L2 for the first BYTES of each row: [n] pointers, 16-byte aligned.

    In a piece a thread where pieces fit: threads beyond the rows would ask for the same again.
    """
    if BYTES % (16 * PIECES) == 0:
        piece = tl.arange(0, PIECES)[None, :] * (BYTES // PIECES)
        ask_l2(w_row[:, None].to(tl.int64) + piece, BYTES // PIECES)
    else:
        ask_l2(w_row.to(tl.int64), BYTES)

"""The launch of products of many float8 rows on Hopper, of weights with scales of blocks.

Few rows are streamed (``streamed_hopper``); elsewhere, and of other scales, Triton kernels serve.
All have the same bits.
"""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.hopper import MULTIPROCESSORS
from sametoken.ops.hopper_layouts import boxes
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.gemm.blocks_hopper_kernels import BLOCK, GROUP_ROWS, blocks_kernel
from sametoken.ops.model.gemm.triton import Scaling, output_of
from sametoken.ops.model.gemm.tuning import Epilogue, GemmShape
from sametoken.ops.model.moe_rows_triton import RowTiles
from sametoken.ops.pdl import pdl_options

#: Rows above which they are faster than Triton's, of gated products and others; of an expert, in
#: the mean.
_FEW_ROWS = {True: 32, False: 64}

#: Rows of a tile.
TILE_ROWS = 2 * GROUP_ROWS.value

#: Slots of tiles in shared memory, of gated products and others.
_SLOTS = {True: 4, False: 6}

#: Registers of a thread, on average over warps.
_REGISTERS = 168


def serves(shape: GemmShape, rows: int) -> bool:
    """Whether this is the kernel of a weight with scales of blocks."""
    # Of a gated product, up begins with a block; TMA reads rows of multiples of 16 bytes.
    gated = shape.epilogue == "silu_mul"
    whole = not gated or shape.out_features % (2 * BLOCK.value) == 0
    return rows > _FEW_ROWS[gated] and whole and shape.in_features % 16 == 0


def product(
    x: Tensor, matrix: Tensor, epilogue: Epilogue, bias: Tensor | None, scaling: Scaling
) -> Tensor:
    """One product; arguments as for ``gemm.product``.

    Args:
        x: [T, K] float8, contiguous; K is a multiple of 16.
        matrix: [N, K] float8, contiguous; for "silu_mul" N is a multiple of 256.
        epilogue, bias: see there.
        scaling: scales of groups of both; rows of the matrix from each multiple of 128 on, as
            many, have the same.
    """
    out = output_of(x, matrix.shape[0], epilogue, scaling.dtype)
    row_tiles = cdiv(len(out), TILE_ROWS)
    num_tiles = row_tiles * cdiv(out.shape[1], BLOCK.value)
    if num_tiles:
        counts = len(out), row_tiles, num_tiles
        _launch(x, matrix, scaling, bias, out, counts, (None,) * 5, gated=epilogue == "silu_mul")
    return out


def expert_product(
    x: Tensor, matrices: Tensor, scaling: Scaling, out: Tensor, tiles: RowTiles, *, in_order: bool
) -> None:
    """Multiply rows by their experts' weights, and apply SiLU where those have gate and up.

    Args:
        x: [rows, K] float8 by expert; K is a multiple of 16.
        matrices: [E, N, K] float8, contiguous.
        scaling: of both, [E, N, groups] and [rows, groups], as for ``product``.
        out: [rows, N], or [rows, N / 2], a multiple of 128, written.
        tiles: of TILE_ROWS rows.
        in_order: results lie in the order of pairs, not by expert.
    """
    order = tiles.order if in_order else None
    places = tiles.count, tiles.experts, tiles.firsts, tiles.ends, order
    flat = Scaling(scaling.features.flatten(0, 1), scaling.rows, scaling.dtype)
    # How many tiles there are, the device knows.
    counts = len(out), 0, MULTIPROCESSORS
    gated = matrices.shape[1] > out.shape[1]
    _launch(x, matrices.flatten(0, 1), flat, None, out, counts, places, gated=gated)


def _launch(
    x: Tensor,
    matrix: Tensor,
    scaling: Scaling,
    bias: Tensor | None,
    out: Tensor,
    counts: tuple[int, int, int],
    tiles: tuple[Tensor | None, ...],
    *,
    gated: bool,
) -> None:
    """Launch with the kernel's rows, tiles of rows and tiles, and with experts' tiles or none."""
    assert scaling.rows is not None
    assert scaling.rows.shape == (x.shape[0], scaling.features.shape[1])
    for tensor in (x, matrix, scaling.rows, scaling.features, out):
        assert tensor.is_contiguous()
    blocks_kernel[(min(counts[2], MULTIPROCESSORS),)](
        boxes(x, GROUP_ROWS.value),
        boxes(matrix, BLOCK.value),
        scaling.features,
        scaling.rows,
        bias,
        out,
        *counts,
        scaling.rows.shape[1],
        out.shape[1],
        *tiles,
        GATED=gated,
        SLOTS=_SLOTS[gated],
        num_warps=4,
        maxnreg=_REGISTERS,
        **pdl_options(x),
    )

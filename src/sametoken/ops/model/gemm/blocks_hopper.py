"""The launch of products of many float8 rows on Hopper, of weights with scales of blocks.

On other chips, of few rows and of other scales, Triton kernels serve, with the same bits.
"""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.hopper import MULTIPROCESSORS
from sametoken.ops.hopper_layouts import boxes
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.gemm.blocks_hopper_kernels import BLOCK, GROUP_ROWS, blocks_kernel
from sametoken.ops.model.gemm.triton import Scaling, output_of
from sametoken.ops.model.gemm.tuning import Epilogue, GemmShape
from sametoken.ops.pdl import pdl_options

#: Rows above which they are faster than Triton's.
FEW_ROWS = 64

#: Slots of tiles in shared memory, of gated products and others.
_SLOTS = {True: 4, False: 6}

#: Registers of a thread, on average over warps.
_REGISTERS = 168


def serves(shape: GemmShape, rows: int) -> bool:
    """Whether this is the kernel of a weight with scales of blocks."""
    # Of a gated product, up begins with a block; TMA reads rows of multiples of 16 bytes.
    whole = shape.epilogue != "silu_mul" or shape.out_features % (2 * BLOCK.value) == 0
    return rows > FEW_ROWS and whole and shape.in_features % 16 == 0


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
    gated = epilogue == "silu_mul"
    assert scaling.rows is not None
    assert scaling.rows.shape == (x.shape[0], scaling.features.shape[1])
    assert scaling.rows.is_contiguous()
    assert scaling.features.is_contiguous()
    out = output_of(x, matrix.shape[0], epilogue, scaling.dtype)
    rows, out_features = out.shape
    if not rows:
        return out
    row_tiles = cdiv(rows, 2 * GROUP_ROWS.value)
    num_tiles = row_tiles * cdiv(out_features, BLOCK.value)
    blocks_kernel[(min(num_tiles, MULTIPROCESSORS),)](
        boxes(x, GROUP_ROWS.value),
        boxes(matrix, BLOCK.value),
        scaling.features,
        scaling.rows,
        bias,
        out,
        rows,
        row_tiles,
        num_tiles,
        scaling.rows.shape[1],
        out_features,
        GATED=gated,
        SLOTS=_SLOTS[gated],
        num_warps=4,
        maxnreg=_REGISTERS,
        **pdl_options(x),
    )
    return out

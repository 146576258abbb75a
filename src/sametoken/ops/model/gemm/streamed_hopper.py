"""The launch of products of few rows on Hopper GPUs, in bf16, fp16 or float8 (``StreamedConfig``).

Elsewhere, of more rows and of scales of other kinds, others serve, with the same bits.
"""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.hopper import MULTIPROCESSORS, SHARED_MEMORY
from sametoken.ops.hopper_layouts import boxes, boxes_of_halves
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.gemm.streamed_hopper_kernels import streamed_kernel
from sametoken.ops.model.gemm.triton import Scaling, output_of
from sametoken.ops.model.gemm.tuning import Epilogue, StreamedConfig
from sametoken.ops.pdl import pdl_options
from sametoken.ops.triton_versions import VIEWS_REACH_FURTHER

#: Bytes of shared memory that the compiler needs for itself.
_OTHER_BYTES = 2 << 10

#: Registers of a thread, on average over warps, by warp groups that multiply.
_REGISTERS = {1: 128, 2: 168, 3: 128}


def product(
    config: StreamedConfig,
    x: Tensor,
    matrix: Tensor,
    epilogue: Epilogue,
    bias: Tensor | None,
    scaling: Scaling | None = None,
) -> Tensor:
    """One product; arguments as for ``gemm.product``.

    Args:
        config: the tiles.
        x: [T, K], contiguous; rows are of a multiple of 16 bytes.
        matrix: [N, K], contiguous, which no kernel writes that may still run; for "silu_mul", N is
            a multiple of 16.
        epilogue, bias: see there.
        scaling: of float8 operands, a scale a row and a feature, or of groups of both; those of
            features are written by no kernel either.
    """
    gated, features = epilogue == "silu_mul", config.block_features
    assert features == 32 or not gated
    assert x.dtype == matrix.dtype
    scale_groups = None
    if scaling is not None and scaling.grouped:
        assert scaling.rows is not None
        scale_groups = scaling.features.shape[1]
        assert scaling.rows.shape[1] == scale_groups
    out = output_of(x, matrix.shape[0], epilogue, x.dtype if scaling is None else scaling.dtype)
    rows, out_features = out.shape
    if not rows:
        return out
    box = 64 if gated else 16 if features == 48 else features
    row_tiles = cdiv(rows, config.block_rows)
    num_tiles = row_tiles * cdiv(out_features, config.warp_groups * features)
    depth = config.boxes * 128 // x.itemsize
    streamed_kernel[(min(num_tiles, MULTIPROCESSORS),)](
        boxes(x, config.block_rows),
        boxes_of_halves(matrix) if gated else boxes(matrix, box),
        None if scaling is None else scaling.features,
        None if scaling is None else scaling.rows,
        scale_groups,
        bias,
        out,
        rows,
        row_tiles,
        num_tiles,
        cdiv(x.shape[1], depth),
        out_features,
        GATED=gated,
        ROWS=config.block_rows,
        FEATURES=features,
        HEIGHT=_height(config, epilogue),
        BOX=box,
        GROUPS=config.warp_groups,
        PARTS=config.boxes,
        SLOTS=_slots(config, epilogue, out.itemsize, scale_groups is not None),
        num_warps=4,
        maxnreg=_REGISTERS[config.warp_groups],
        **pdl_options(x),
    )
    return out


def _height(config: StreamedConfig, epilogue: Epilogue) -> int:
    """Rows of shared memory for a warp group's weights."""
    return 64 if epilogue == "silu_mul" or not VIEWS_REACH_FURTHER else config.block_features


def _slots(config: StreamedConfig, epilogue: Epilogue, out_bytes: int, grouped: bool) -> int:
    """As many as shared memory has room for, beside results on their way to memory."""
    height, results = _height(config, epilogue), 32 if epilogue == "silu_mul" else 64
    others = _OTHER_BYTES + (64 - height) * 128
    others += config.warp_groups * results * config.block_rows * out_bytes
    slot = 128 * config.boxes * (height * config.warp_groups + config.block_rows) + 32
    if grouped:
        slot += 4 * config.boxes * (64 * config.warp_groups + config.block_rows)
    return (SHARED_MEMORY - others) // slot

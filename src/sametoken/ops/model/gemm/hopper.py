"""Gate, up and SiLU of many rows on Hopper GPUs: the launch of its kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sametoken.ops.hopper import MULTIPROCESSORS
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.gemm.hopper_kernels import (
    GROUP_ROWS,
    STAGE_BYTES,
    TILE_ROWS,
    gated_kernel,
)
from sametoken.ops.model.gemm.tuning import GatedConfig
from sametoken.ops.pdl import pdl_options

#: Stages of the pipeline by features of a tile: what shared memory holds beside a stored tile.
STAGES = {64: 6, 128: 4}

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def gated_product(
    config: GatedConfig,
    x: Tensor,
    matrix: Tensor,
    *,
    feature_scales: Tensor | None = None,
    row_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``silu(gate) * up`` with [gate | up] = x @ matrix.T: [T, K], [2I, K] -> [T, I].

    Args:
        config: the tile.
        x: contiguous, bf16, fp16 or float8 e4m3; K and I are multiples of 8, of float8 K of 16.
        matrix: contiguous, of x's dtype.
        feature_scales: [2I] fp32, of a float8 matrix.
        row_scales: [T] fp32, of float8 rows.
        dtype: of the result; None: x's.
    """
    (num_rows, depth), features = x.shape, matrix.shape[0] // 2
    out = torch.empty(num_rows, features, dtype=dtype or x.dtype, device=x.device)
    row_tiles = cdiv(num_rows, TILE_ROWS.value)
    num_tiles = row_tiles * cdiv(features, config.block_features)
    if num_tiles:
        in_stage = STAGE_BYTES.value // x.element_size()
        gated_kernel[(min(num_tiles, MULTIPROCESSORS),)](
            _boxes(x, [GROUP_ROWS.value, in_stage]),
            _boxes(matrix, [config.block_features, in_stage]),
            _boxes(out, [GROUP_ROWS.value, config.block_features]),
            feature_scales,
            row_scales,
            row_tiles,
            num_tiles,
            num_rows,
            features,
            depth,
            FEATURES=config.block_features,
            STAGES=STAGES[config.block_features],
            num_warps=4,
            maxnreg=168,
            **pdl_options(x),
        )
    return out


def _boxes(rows: Tensor, shape: list[int]) -> TensorDescriptor:
    """What one TMA load or store moves."""
    layout = gl.NVMMASharedLayout.get_default_for(shape, _DTYPES[rows.dtype])
    return TensorDescriptor.from_tensor(rows, shape, layout)

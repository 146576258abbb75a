"""Float8 products of few rows on Hopper GPUs: which they serve, and the launch.

On other chips, of more rows and of other scales, ``fp8_triton`` serves, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.hopper import MULTIPROCESSORS, SHARED_MEMORY, is_hopper
from sametoken.ops.hopper_layouts import boxes
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.model.gemm.fp8_hopper_kernels import PARTS, few_rows_kernel
from sametoken.ops.model.gemm.tuning import Epilogue
from sametoken.ops.pdl import pdl_options

#: Rows of a tile, and the most that are served: more gain nothing.
ROWS = 8

#: Bytes of shared memory beside slots, in which sums of gate and up meet.
_OTHER_BYTES = 19 << 10


def serves(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether these kernels take a product with rounded rows; TMA needs rows of 16 bytes."""
    return (
        len(x) <= ROWS
        and weight.rounding is not None
        and not weight.rounding.grouped
        and weight.scale.dim() == 1
        and weight.in_features % 16 == 0
        and is_hopper(x.device)
    )


def product(
    x: Tensor,
    row_scales: Tensor,
    weight: Fp8Weight,
    epilogue: Epilogue,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """One product; ``epilogue`` and ``bias`` as in ``gemm.triton``.

    Args:
        x: [T, K] float8 e4m3, contiguous.
        row_scales: [T] fp32.
        weight: [N, K], as ``serves`` says.
        epilogue, bias: see above.
        dtype: of the result, except of logits.
    """
    rows, in_features = x.shape
    gated = epilogue == "silu_mul"
    out_features = weight.out_features // 2 if gated else weight.out_features
    out_dtype = torch.float32 if epilogue == "logits" else dtype
    out = torch.empty(rows, out_features, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    row_tiles, depth = cdiv(rows, ROWS), PARTS.value * 128
    num_tiles = row_tiles * cdiv(out_features, 32 if gated else 64)
    few_rows_kernel[(min(num_tiles, MULTIPROCESSORS),)](
        boxes(x, ROWS),
        boxes(weight.matrix, 32),
        weight.scale,
        row_scales,
        bias,
        out,
        rows,
        row_tiles,
        num_tiles,
        cdiv(in_features, depth),
        out_features,
        GATED=gated,
        ROWS=ROWS,
        SLOTS=(SHARED_MEMORY - _OTHER_BYTES) // (depth * (64 + ROWS)),
        num_warps=4,
        maxnreg=128,
        **pdl_options(x),
    )
    return out

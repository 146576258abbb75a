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
from sametoken.ops.model.gemm.triton import output_of
from sametoken.ops.model.gemm.tuning import Epilogue
from sametoken.ops.pdl import pdl_options

#: Rows of a product, at most: more gain nothing.
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
        x: [T, K] float8 e4m3, contiguous; T is at most ``ROWS``.
        row_scales: [T] fp32.
        weight: [N, K], as ``serves`` says.
        epilogue, bias: see above.
        dtype: of the result, except of logits.
    """
    out = output_of(x, weight.out_features, epilogue, dtype)
    rows, out_features = out.shape
    if not rows:
        return out
    gated, depth = epilogue == "silu_mul", PARTS.value * 128
    num_tiles = cdiv(out_features, 32 if gated else 64)
    few_rows_kernel[(min(num_tiles, MULTIPROCESSORS),)](
        boxes(x, ROWS),
        boxes(weight.matrix, 32),
        weight.scale,
        row_scales,
        bias,
        out,
        rows,
        num_tiles,
        cdiv(weight.in_features, depth),
        out_features,
        GATED=gated,
        ROWS=ROWS,
        SLOTS=(SHARED_MEMORY - _OTHER_BYTES) // (depth * (64 + ROWS)),
        num_warps=4,
        maxnreg=128,
        **pdl_options(x),
    )
    return out

"""Products of few rows with 4-bit weights on Hopper GPUs: which they serve, and the launch.

On other chips, and of other forms, ``int4_triton.product`` serves, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.hopper import MULTIPROCESSORS, SHARED_MEMORY, is_hopper
from sametoken.ops.hopper_layouts import boxes
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.gemm.int4_hopper_kernels import GROUPS, WORDS, turns_kernel
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.triton import output_of
from sametoken.ops.model.gemm.tuning import Epilogue
from sametoken.ops.pdl import pdl_options

#: Above these rows, the matrix is expanded in memory once rather than in every tile of rows.
FEW_ROWS = 384

#: Rows of a tile; more rows have several.
_ROWS = (8, 16, 32, 64)

#: Bytes of shared memory beside slots and sums.
_OTHER_BYTES = 4096


def serves(panels: Int4Panels, dtype: torch.dtype) -> bool:
    """Whether these kernels multiply rows of this dtype; TMA needs rows of 16 bytes.

    A warp group has a chunk of every tile, as it looks no further than the next one for scales.
    """
    return (
        panels.made_by(dtype) is not None
        and panels.in_features % 8 == 0
        and _chunks(panels) >= GROUPS.value
        and is_hopper(panels.words.device)
    )


def product(
    x: Tensor, panels: Int4Panels, epilogue: Epilogue = "none", bias: Tensor | None = None
) -> Tensor:
    """One product; ``epilogue`` and ``bias`` as in ``gemm.product``.

    Args:
        x: [T, K], contiguous.
        panels: of [N, K], as ``serves`` says.
        epilogue, bias: see above.
    """
    assert x.is_contiguous()
    form = panels.made_by(x.dtype)
    assert form is not None
    assert _chunks(panels) >= GROUPS.value
    rows, in_features = x.shape
    assert in_features == panels.in_features
    out = output_of(x, panels.out_features, epilogue, x.dtype)
    gated, out_features = epilogue == "silu_mul", out.shape[1]
    if not rows:
        return out
    tile = next((size for size in _ROWS if rows <= size), _ROWS[-1])
    row_tiles = cdiv(rows, tile)
    num_tiles = row_tiles * cdiv(out_features, 32 if gated else 64)
    turns_kernel[(min(num_tiles, MULTIPROCESSORS),)](
        boxes(x, tile),
        boxes(panels.words, 32),
        panels.kernel_scales,
        panels.offsets,
        panels.factors,
        bias,
        out,
        rows,
        row_tiles,
        num_tiles,
        _chunks(panels),
        panels.words.shape[1] // 16,
        out_features,
        GATED=gated,
        FORM=form,
        IN_BLOCK=128 // panels.width,
        ROWS=tile,
        SLOTS=_slots(tile),
        num_warps=4,
        maxnreg=128,
        **pdl_options(x),
    )
    return out


def _chunks(panels: Int4Panels) -> int:
    return cdiv(panels.words.shape[1], WORDS.value)


def _slots(tile: int) -> int:
    """As many as shared memory has room for, beside sums; more than 8 are of no use."""
    slot: int = 32 * WORDS.value * 8 + tile * WORDS.value * 16
    return min(8, (SHARED_MEMORY - _OTHER_BYTES - 256 * tile) // slot)

"""Products in eight bits for draft heads on a GPU: both operands float8 e4m3, sums fp32.

The kernel is that of ``gemm.triton``. Of a loop turn's ``DEPTH`` products a matrix unit may
keep 14 bits, so every choice has that depth, and no choice changes a bit
(tests/gpu/test_eight_bit_gpu.py).
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.gemm import triton as gemm
from sametoken.kernels.gemm.eight_bit import STEP, TINY, EightBitWeight
from sametoken.kernels.gemm.triton import Scaling
from sametoken.kernels.gemm.tuning import Epilogue, GemmShape, TritonConfig
from sametoken.kernels.overlap import overlapped, wait_for_earlier

#: Elements of the sum per loop turn.
DEPTH = 128

#: Hopper's unit for operands in shared memory takes so many features at once.
FEATURES = 64

#: Below so many features 128 at once would leave multiprocessors without a program, and what
#: the few programs have in flight is worth asking for early.
NARROW = 16_384

#: From so many features on programs come in many waves, and small ones share a multiprocessor.
WIDE = 100_000


class Tile(NamedTuple):
    """A program's part of a product.

    Attributes:
        features: rows of the weight that a loop turn reads, of gate and up together.
        num_warps: warps of the program.
        num_stages: depth of the load pipeline, which fits the 99 KiB of compute capability 8.9.
    """

    features: int
    num_warps: int
    num_stages: int


_NARROW_TILES = {16: Tile(64, 4, 9), 32: Tile(64, 4, 8), 64: Tile(64, 4, 6), 128: Tile(64, 4, 4)}
_MIDDLE_TILES = {16: Tile(128, 4, 5), 32: Tile(128, 4, 4), 64: Tile(128, 4, 4)}
_WIDE_TILES = {16: Tile(64, 4, 6), 32: Tile(64, 4, 6), 64: Tile(64, 4, 6)}
_MANY_ROWS = 128
_MANY_ROWS_TILE = Tile(128, 8, 3)


def default_config(shape: GemmShape, rows: int, overlap: bool) -> TritonConfig:
    """A kernel for a shape; ``benchmarks/eight_bit_gpu.py`` times others beside it."""
    gated = shape.epilogue == "silu_mul"
    wide = shape.out_features >= WIDE and not gated
    narrow = shape.out_features < NARROW and not gated
    tiles = _WIDE_TILES if wide else _NARROW_TILES if narrow else _MIDDLE_TILES
    block_rows = next((size for size in (16, 32, 64) if rows <= size), _MANY_ROWS)
    tile = tiles.get(block_rows, _MANY_ROWS_TILE)
    return TritonConfig(
        block_rows,
        tile.features // (2 if gated else 1),
        DEPTH,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        overlap=overlap,
        prefetch_bytes=1024 if narrow else 0,
    )


def linear(x: Tensor, weight: EightBitWeight, bias: Tensor | None = None) -> Tensor:
    """``eight_bit.linear`` on a GPU: [T, K] -> [T, N] in x's dtype."""
    return product(x, weight, "none" if bias is None else "bias", bias)


def linear_silu_mul(x: Tensor, weight: EightBitWeight) -> Tensor:
    """``silu(gate) * up`` of [gate | up] = ``linear(x, weight)``: [T, K] -> [T, N / 2]."""
    return product(x, weight, "silu_mul")


def logits(x: Tensor, weight: EightBitWeight) -> Tensor:
    """``eight_bit.logits`` on a GPU: [L, K] -> [L, V] fp32."""
    return product(x, weight, "logits")


def product(
    x: Tensor,
    weight: EightBitWeight,
    epilogue: Epilogue = "none",
    operand: Tensor | None = None,
    config: TritonConfig | None = None,
) -> Tensor:
    """One product of rounded activations.

    Args:
        x: [T, K], contiguous.
        weight: [N, K].
        epilogue, operand: as in ``gemm.triton.product``.
        config: by default that of ``default_config``; its depth is ``DEPTH``.
    """
    rows, in_features = x.shape
    assert in_features == weight.in_features
    assert weight.matrix.is_contiguous()
    shape = GemmShape(weight.out_features, in_features, epilogue)
    config = config or default_config(shape, rows, overlapped(x)["OVERLAP"])
    assert config.block_depth == DEPTH
    assert config.block_features % FEATURES == 0
    matrix, scale = rounded(x)
    scaling = Scaling(weight.scale, scale, x.dtype)
    return gemm.tiled_product(config, matrix, weight.matrix, epilogue, operand, scaling)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """``eight_bit.rounded`` on a GPU, of a contiguous [T, K], to the same bits."""
    assert x.is_contiguous()
    rows, width = x.shape
    matrix = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _round_kernel[(rows,)](
            x,
            matrix,
            scale,
            width,
            STEP=STEP,
            TINY=TINY,
            BLOCK=block,
            num_warps=min(32, max(4, block // 512)),
            **overlapped(x),
        )
    return matrix, scale


@triton.jit
def _round_kernel(
    x,  # [rows, width]
    matrix,  # [rows, width] float8 e4m3
    scale,  # [rows] fp32
    width,
    STEP: tl.constexpr,
    TINY: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    element = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * width + element
    wait_for_earlier(OVERLAP)
    value = tl.load(x + at, mask=element < width, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value)), TINY) * STEP
    # NaN is passed over by the largest and stays what it is in the row.
    value *= tl.div_rn(1.0, step)
    tl.store(matrix + at, value.to(matrix.dtype.element_ty), mask=element < width)
    tl.store(scale + row, step)

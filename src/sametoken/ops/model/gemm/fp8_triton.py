"""Products in fp8 for draft heads on a GPU: both operands float8 e4m3, sums fp32.

The kernel is that of ``gemm.triton``. Of a loop turn's ``DEPTH`` products a matrix unit may
keep 14 bits, so every choice has that depth, and no choice changes a bit
(tests/gpu/test_fp8_gpu.py).
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from sametoken.ops.model.gemm import triton as gemm
from sametoken.ops.model.gemm.fp8 import (
    STEP,
    TINY,
    Fp8Weight,
)
from sametoken.ops.model.gemm.triton import (
    Scaling,
    epilogue_of,
)
from sametoken.ops.model.gemm.tuning import (
    Epilogue,
    GemmShape,
    TritonConfig,
)
from sametoken.ops.pdl import (
    gdc_launch_and_wait,
    pdl_options,
)

#: Elements of the sum per loop turn.
DEPTH = 128

#: Hopper's unit for operands in shared memory takes so many features at once.
FEATURES = 64

HOPPER_MEMORY = 227 << 10

#: Below so many features a weight has fewer programs than a large chip multiprocessors: each has
#: one to itself, and all its memory for what is in flight.
NARROW = 8448

#: Up to so many features small programs share a multiprocessor in one wave.
MIDDLE = 16_384

#: From so many features on programs come in many waves, and small ones share a multiprocessor.
WIDE = 100_000


class Tile(NamedTuple):
    """A program's part of a product.

    Attributes:
        features: rows of the weight that a loop turn reads, of gate and up together.
        num_warps: warps of the program.
        num_stages: depth of the load pipeline, where there is room for it.
    """

    features: int
    num_warps: int
    num_stages: int


# By a tile's rows, as ``benchmarks/kernels/fp8_gpu.py`` measured them.
_NARROW = {16: Tile(64, 4, 14), 32: Tile(64, 4, 12), 64: Tile(64, 4, 9), 128: Tile(64, 4, 6)}
_SHARED = {16: Tile(64, 4, 6), 32: Tile(64, 4, 6), 64: Tile(64, 4, 6), 128: Tile(64, 4, 4)}
_MIDDLE = {16: Tile(128, 4, 5), 32: Tile(128, 4, 4), 64: Tile(128, 4, 4), 128: Tile(64, 4, 4)}
_GATED = {16: Tile(128, 4, 4), 32: Tile(128, 4, 4), 64: Tile(128, 4, 4), 128: Tile(128, 8, 3)}


def default_config(
    shape: GemmShape, rows: int, pdl: bool, memory: int = HOPPER_MEMORY
) -> TritonConfig:
    """The kernel for a shape.

    Args:
        shape: of the product.
        rows: activations.
        pdl: the chip is a Hopper or newer: kernels overlap, and tiles load by descriptor.
        memory: bytes of shared memory that a program can have.
    """
    features, gated = shape.out_features, shape.epilogue == "silu_mul"
    narrow = features < NARROW and not gated
    shared = features < MIDDLE or features >= WIDE
    tiles = _GATED if gated else _NARROW if narrow else _SHARED if shared else _MIDDLE
    block_rows = next((size for size in (16, 32, 64) if rows <= size), 128)
    if narrow and 32 < rows <= 128:
        # Two programs share a tile of the weight, so that twice as many read.
        block_rows //= 2
    tile = tiles[block_rows]
    many = pdl and block_rows == 128
    return TritonConfig(
        block_rows,
        tile.features // (2 if gated else 1),
        DEPTH,
        num_warps=tile.num_warps,
        num_stages=min(tile.num_stages, memory // (DEPTH * (block_rows + tile.features))),
        tma=many,
        tma_rows=many,
        pdl=pdl,
        prefetch_bytes=1024 if narrow and rows <= 32 else 0,
    )


class Fp8DeviceWeight(Fp8Weight):
    """``Fp8Weight`` on a GPU."""

    __slots__ = ()

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return product(x, self, epilogue_of(bias, out_dtype), bias)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return product(x, self, "silu_mul")


def product(
    x: Tensor,
    weight: Fp8Weight,
    epilogue: Epilogue = "none",
    bias: Tensor | None = None,
    config: TritonConfig | None = None,
) -> Tensor:
    """One product of rounded activations.

    Args:
        x: [T, K], contiguous.
        weight: [N, K].
        epilogue, bias: as in ``gemm.triton.product``.
        config: by default that of ``default_config``; its depth is ``DEPTH``.
    """
    rows, in_features = x.shape
    assert in_features == weight.in_features
    assert weight.matrix.is_contiguous()
    shape = GemmShape(weight.out_features, in_features, epilogue)
    config = config or default_config(shape, rows, pdl_options(x)["PDL"], _memory(x))
    assert config.block_depth == DEPTH
    assert config.block_features % FEATURES == 0
    matrix, scale = rounded(x)
    scaling = Scaling(weight.scale, scale, x.dtype)
    return gemm.tiled_product(config, matrix, weight.matrix, epilogue, bias, scaling)


def _memory(x: Tensor) -> int:
    """Bytes of shared memory that a program can have on the tensor's device."""
    return _memory_of(x.get_device()) if x.is_cuda else HOPPER_MEMORY


@functools.cache
def _memory_of(device: int) -> int:
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """``fp8.rounded`` on a GPU, of a contiguous [T, K], to the same bits."""
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
            **pdl_options(x),
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
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    element = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * width + element
    gdc_launch_and_wait(PDL)
    value = tl.load(x + at, mask=element < width, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value)), TINY) * STEP
    # NaN is passed over by the largest and stays what it is in the row.
    value *= tl.div_rn(1.0, step)
    tl.store(matrix + at, value.to(matrix.dtype.element_ty), mask=element < width)
    tl.store(scale + row, step)

"""fp8 products on a GPU: a float8 e4m3 matrix, activations rounded to it or not, sums fp32.

The kernel is that of ``gemm.triton``. Tensor cores may keep only 14 bits of the sum of an
iteration's ``DEPTH`` products, so every configuration has that depth and the same bits
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
from sametoken.ops.model.gemm.fp8 import GROUP, LARGEST, STEP, TINY, Fp8Weight
from sametoken.ops.model.gemm.triton import Scaling, epilogue_of
from sametoken.ops.model.gemm.tuning import Epilogue, GemmShape, TritonConfig
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.weight import BY_ROW, Rounding

#: Elements of the sum per loop iteration.
DEPTH = 128

#: Features per instruction of Hopper's wgmma (operands in shared memory).
FEATURES = 64

#: Bytes of shared memory per program on Hopper.
HOPPER_MEMORY = 227 << 10

#: A weight with fewer features has fewer programs than a large chip has multiprocessors: each has
#: one to itself, and all of its shared memory for loads in flight.
NARROW = 8448

#: With fewer features, small programs share a multiprocessor in one wave.
MIDDLE = 16_384

#: From this number of features, programs run in many waves and small ones share a multiprocessor.
WIDE = 100_000


class Tile(NamedTuple):
    """A program's tile.

    Attributes:
        features: rows of the weight that an iteration reads, gate and up together.
        num_warps: warps of the program.
        num_stages: depth of the load pipeline, if shared memory suffices.
    """

    features: int
    num_warps: int
    num_stages: int


# By a tile's rows, as tuned by ``benchmarks/kernels/fp8_gpu.py``.
_NARROW = {16: Tile(64, 4, 14), 32: Tile(64, 4, 12), 64: Tile(64, 4, 9), 128: Tile(64, 4, 6)}
_SHARED = {16: Tile(64, 4, 6), 32: Tile(64, 4, 6), 64: Tile(64, 4, 6), 128: Tile(64, 4, 4)}
_MIDDLE = {16: Tile(128, 4, 5), 32: Tile(128, 4, 4), 64: Tile(128, 4, 4), 128: Tile(64, 4, 4)}
_GATED = {16: Tile(128, 4, 4), 32: Tile(128, 4, 4), 64: Tile(128, 4, 4), 128: Tile(128, 8, 3)}

# Large tiles, so that fewer bytes come from L2 for each product, where they still make several
# waves of programs; of gated products half of the features are up's.
_MANY, _MANY_GATED = Tile(128, 8, 4), Tile(256, 8, 4)
_WAVES = 2 * 132


def default_config(
    shape: GemmShape, rows: int, pdl: bool, memory: int = HOPPER_MEMORY, row_bytes: int = 1
) -> TritonConfig:
    """The kernel for a shape.

    Args:
        shape: of the product.
        rows: number of activation rows.
        pdl: the chip is a Hopper or newer: programmatic dependent launch and TMA loads.
        memory: bytes of shared memory per program.
        row_bytes: bytes of an element of the activations.
    """
    features, gated = shape.out_features, shape.epilogue == "silu_mul"
    narrow = features < NARROW and not gated
    shared = features < MIDDLE or features >= WIDE
    tiles = _GATED if gated else _NARROW if narrow else _SHARED if shared else _MIDDLE
    block_rows = next((size for size in (16, 32, 64) if rows <= size), 128)
    if narrow and 32 < rows <= 128:
        # Two programs share a weight tile, so that twice as many programs load.
        block_rows //= 2
    tile, large = tiles[block_rows], _MANY_GATED if gated else _MANY
    programs = triton.cdiv(rows, block_rows) * (features // large.features)
    fits = memory >= 3 * DEPTH * (block_rows + large.features)
    if block_rows == 128 and row_bytes == 1 and programs >= _WAVES and fits:
        tile = large
    depth_bytes = DEPTH * (row_bytes * block_rows + tile.features)
    num_stages = min(tile.num_stages, memory // depth_bytes)
    # An iteration waits for its product, which is summed apart: two at a time wait together. A
    # stage then holds both.
    unroll = 2 if narrow and block_rows == 16 and row_bytes == 1 else None
    # TMA reads rows that begin at multiples of 16 bytes.
    many = pdl and block_rows == 128 and shape.in_features % 16 == 0
    return TritonConfig(
        block_rows,
        tile.features // (2 if gated else 1),
        DEPTH,
        num_warps=tile.num_warps,
        num_stages=num_stages // (unroll or 1),
        tma=many,
        tma_rows=many,
        pdl=pdl,
        prefetch_bytes=1024 if narrow and rows <= 32 else 0,
        unroll=unroll,
    )


class Fp8DeviceWeight(Fp8Weight):
    """``Fp8Weight`` on a GPU."""

    __slots__ = ("__weakref__",)

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
    """One product with quantized activations.

    Args:
        x: [T, K], contiguous.
        weight: [N, K].
        epilogue, bias: as in ``gemm.triton.product``.
        config: by default ``default_config``; its depth must be ``DEPTH``.
    """
    rows, in_features = x.shape
    assert in_features == weight.in_features
    assert weight.matrix.is_contiguous()
    shape = GemmShape(weight.out_features, in_features, epilogue)
    values, x_scale = x, None
    if weight.rounding is not None:
        values, x_scale = rounded(x, weight.rounding)
    config = config or default_config(
        shape, rows, pdl_options(x)["PDL"], shared_memory(x), values.element_size()
    )
    assert config.block_depth == DEPTH == GROUP
    assert config.block_features % FEATURES == 0
    scaling = Scaling(weight.scale, x_scale, x.dtype)
    return gemm.tiled_product(config, values, weight.matrix, epilogue, bias, scaling)


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory per program on the tensor's device."""
    return _memory_of(x.get_device()) if x.is_cuda else HOPPER_MEMORY


@functools.cache
def _memory_of(device: int) -> int:
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


def rounded(x: Tensor, rounding: Rounding = BY_ROW) -> tuple[Tensor, Tensor]:
    """``fp8.rounded_by`` of a contiguous [T, K] on a GPU, with the same bits."""
    assert x.is_contiguous()
    rows, width = x.shape
    groups = triton.cdiv(width, GROUP) if rounding.grouped else 1
    matrix = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    shape = (rows, groups) if rounding.grouped else (rows,)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if rows:
        block = GROUP if rounding.grouped else triton.next_power_of_2(width)
        _round_kernel[(rows, groups)](
            x,
            matrix,
            scale,
            rounding.scale,
            width,
            STEP=STEP,
            TINY=TINY,
            LARGEST=LARGEST,
            BLOCK=block,
            num_warps=1 if rounding.grouped else min(32, max(4, block // 512)),
            **pdl_options(x),
        )
    return matrix, scale


@triton.jit
def _round_kernel(
    x,  # [rows, width]
    matrix,  # [rows, width] float8 e4m3
    scale,  # [rows], or [rows, groups]: of each program
    fixed,  # [], the scale of all rows, or None
    width,
    STEP: tl.constexpr,
    TINY: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = group * BLOCK + tl.arange(0, BLOCK)
    at = row * width + element
    gdc_launch_and_wait(PDL)
    value = tl.load(x + at, mask=element < width, other=0.0).to(tl.float32)
    if fixed is not None:
        step = tl.load(fixed)
        value *= tl.div_rn(1.0, step)
        value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    else:
        step = tl.maximum(tl.max(tl.abs(value)), TINY) * STEP
        # tl.max skips NaN, which stays NaN in the row.
        value *= tl.div_rn(1.0, step)
    tl.store(matrix + at, value.to(matrix.dtype.element_ty), mask=element < width)
    tl.store(scale + row * tl.num_programs(1) + group, step)

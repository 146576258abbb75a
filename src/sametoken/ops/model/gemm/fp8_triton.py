"""fp8 products on a GPU: a float8 e4m3 matrix, activations rounded to it or not, sums fp32.

The kernel is that of ``gemm.triton``. Tensor cores keep about 14 bits of a sum of float8 products.
With a scale a row and a feature they add up the whole sum, in one order, whatever the tiles; scales
of groups end a sum every ``DEPTH`` elements. So all configurations have the same bits
(tests/gpu/test_fp8_gpu.py).
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.hopper import MULTIPROCESSORS, SHARED_MEMORY, is_hopper, shared_memory
from sametoken.ops.model.gemm import blocks_hopper, streamed_hopper
from sametoken.ops.model.gemm import triton as gemm
from sametoken.ops.model.gemm.fp8 import (
    EXPONENT,
    GROUP,
    LARGEST,
    MANTISSA,
    STEP,
    TINY,
    Fp8Weight,
)
from sametoken.ops.model.gemm.triton import Scaling, epilogue_of
from sametoken.ops.model.gemm.tuning import (
    Epilogue,
    GemmShape,
    StreamedConfig,
    TritonConfig,
    streamed_config,
)
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.weight import BY_ROW, Normed, RoundedRows, Rounding

#: Elements of the sum per loop iteration of few rows, and of a group of scales.
DEPTH = 128

#: Features per instruction of Hopper's wgmma (operands in shared memory).
FEATURES = 64

#: A weight with fewer features has fewer programs than a large chip has multiprocessors: each has
#: one to itself, and all of its shared memory for loads in flight.
NARROW = 8448

#: With fewer features, small programs share a multiprocessor in one wave.
MIDDLE = 16_384

#: From this number of features, programs run in many waves and small ones share a multiprocessor.
WIDE = 100_000

#: From this depth of the sum, the largest tiles gain more than a launch loses by having fewer.
LONG = 8192

#: Elements that a program of small groups rounds at least.
_ROUNDED_ELEMENTS = 2048

#: Rows above which a tile is chosen by how well a launch fills the chip.
FEW_ROWS = 64

_STEP, _TINY = tl.constexpr(STEP), tl.constexpr(TINY)
_MANTISSA, _EXPONENT = tl.constexpr(MANTISSA), tl.constexpr(EXPONENT)


class Tile(NamedTuple):
    """A program's tile.

    Attributes:
        rows: of the activations.
        features: rows of the weight that an iteration reads, gate and up together.
        num_warps: warps of the program.
        num_stages: depth of the load pipeline, if shared memory suffices.
        depth: elements of the sum per iteration.
        rate: of many rows, of a busy multiprocessor, beside those of other tiles.
    """

    rows: int
    features: int
    num_warps: int
    num_stages: int
    depth: int = DEPTH
    rate: float = 1.0


# By rows up to which a tile serves, as tuned inside whole decode steps of Qwen3-8B's shape
# (``benchmarks/kernels/decode_fp8_gpu.py``).
_NARROW = {16: Tile(16, 64, 4, 7, 256), 32: Tile(32, 64, 4, 6, 256), 64: Tile(64, 64, 4, 5, 256)}
_SHARED = {size: Tile(size, 64, 4, 6) for size in (16, 32, 64)}
_MIDDLE = {16: Tile(16, 128, 4, 5), 32: Tile(32, 128, 4, 4), 64: Tile(64, 128, 4, 4)}
_GATED = {16: Tile(16, 128, 4, 7), 32: Tile(32, 128, 4, 4), 64: Tile(64, 128, 4, 4)}

# Of more rows, for products and for gated ones.
_MANY = (
    Tile(128, 256, 8, 4, rate=0.97),
    Tile(128, 128, 8, 8),
    Tile(128, 64, 4, 8, rate=0.9),
    Tile(64, 128, 4, 8, rate=0.88),
    Tile(64, 64, 4, 8, rate=0.75),
)
_MANY_GATED = (
    Tile(128, 256, 8, 4),
    Tile(128, 128, 8, 6, rate=0.97),
    Tile(64, 128, 4, 6, rate=0.82),
)
#: Of the largest tile of ``_MANY`` in long sums.
_LONG_RATE = 1.05


def default_config(
    shape: GemmShape,
    rows: int,
    pdl: bool,
    memory: int = SHARED_MEMORY,
    row_bytes: int = 1,
    grouped: bool = False,
) -> TritonConfig:
    """The kernel for a shape.

    Args:
        shape: of the product.
        rows: number of activation rows.
        pdl: the chip is a Hopper or newer: programmatic dependent launch and TMA loads.
        memory: bytes of shared memory per program.
        row_bytes: bytes of an element of the activations.
        grouped: sums are multiplied by scales every ``DEPTH`` elements.
    """
    gated = shape.epilogue == "silu_mul"
    narrow = shape.out_features < NARROW and not gated
    if rows <= FEW_ROWS:
        tile = _of_few(shape, rows)
        if grouped or row_bytes > 1:
            # As many bytes in flight, in smaller steps.
            stages = tile.num_stages * tile.depth // DEPTH
            tile = tile._replace(depth=DEPTH, num_stages=stages)
    else:
        tile = _of_many(shape, rows, memory, row_bytes, grouped)
    stage = tile.depth * (row_bytes * tile.rows + tile.features)
    # TMA reads rows that begin at multiples of 16 bytes.
    tma = pdl and rows > FEW_ROWS and shape.in_features % 16 == 0
    return TritonConfig(
        tile.rows,
        tile.features // (2 if gated else 1),
        tile.depth,
        num_warps=tile.num_warps,
        num_stages=min(tile.num_stages, memory // stage),
        tma=tma,
        pdl=pdl,
        prefetch_bytes=1024 if narrow and rows <= FEW_ROWS else 0,
    )


def _of_few(shape: GemmShape, rows: int) -> Tile:
    """The tile of at most ``FEW_ROWS`` rows: of all rows, except for the narrowest weights."""
    size = next(size for size in (16, 32, FEW_ROWS) if rows <= size)
    if shape.epilogue == "silu_mul":
        return _GATED[size]
    if shape.out_features >= NARROW:
        shared = shape.out_features < MIDDLE or shape.out_features >= WIDE
        return (_SHARED if shared else _MIDDLE)[size]
    if size == FEW_ROWS and 2 * triton.cdiv(shape.out_features, FEATURES) <= MULTIPROCESSORS:
        # Two programs share a weight tile, so that twice as many programs load.
        size //= 2
    return _NARROW[size]


def _of_many(shape: GemmShape, rows: int, memory: int, row_bytes: int, grouped: bool) -> Tile:
    """The tile that keeps most multiprocessors busy with products, in the launch's rounds."""
    gated, features = shape.epilogue == "silu_mul", shape.out_features
    best, most = None, 0.0
    for tile in _MANY_GATED if gated else _MANY:
        # Beside wider rows weights are widened in registers; sums of groups need some of their own.
        wide = tile.features > FEATURES * (2 if gated else 1) and row_bytes > 1
        if wide or (grouped and tile is _MANY[0]):
            continue
        stage = tile.depth * (row_bytes * tile.rows + tile.features)
        if memory < 3 * stage:
            continue
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(features, tile.features)
        rounds = triton.cdiv(programs, MULTIPROCESSORS)
        rate = _LONG_RATE if tile is _MANY[0] and shape.in_features >= LONG else tile.rate
        done = rate * rows * features / (rounds * tile.rows * tile.features)
        if done > most:
            # Programs that share a multiprocessor hide each other's waits.
            shared = rounds > 1 and memory >= 6 * stage
            best, most = tile._replace(num_stages=3) if shared else tile, done
    assert best is not None
    return best


class Fp8DeviceWeight(Fp8Weight):
    """``Fp8Weight`` on a GPU."""

    __slots__ = ("__weakref__",)

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return product(x, self, epilogue_of(bias, out_dtype), bias)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return product(x, self, "silu_mul")

    def matmul_rounded(self, rows: RoundedRows, bias: Tensor | None = None) -> Tensor:
        return product(rows, self, epilogue_of(bias, None), bias)

    def gated_matmul_rounded(self, rows: RoundedRows) -> Tensor:
        return product(rows, self, "silu_mul")


def product(
    x: Normed,
    weight: Fp8Weight,
    epilogue: Epilogue = "none",
    bias: Tensor | None = None,
    config: TritonConfig | StreamedConfig | None = None,
) -> Tensor:
    """One product with quantized activations.

    Args:
        x: [T, K], contiguous; rounded only as the weight's products round.
        weight: [N, K].
        epilogue, bias: as in ``gemm.product``.
        config: by default ``streamed_config`` where that kernel serves, else ``default_config``;
            its depth must be ``DEPTH`` if scales are of groups.
    """
    rows, in_features = x.shape
    assert in_features == weight.in_features
    assert weight.matrix.is_contiguous()
    shape = GemmShape(weight.out_features, in_features, epilogue)
    values, x_scale = _operand(x, weight.rounding)
    scaling = Scaling(weight.scale, x_scale, x.dtype)
    scales_match = x_scale is not None and x_scale.dim() == weight.scale.dim()
    if config is None and scales_match and is_hopper(values.device):
        config = streamed_config(shape, rows, 1, grouped=scaling.grouped)
        if config is None and weight.blocks and blocks_hopper.serves(shape, rows):
            return blocks_hopper.product(values, weight.matrix, epilogue, bias, scaling)
    if isinstance(config, StreamedConfig):
        return streamed_hopper.product(config, values, weight.matrix, epilogue, bias, scaling)
    if config is None:
        pdl, memory = pdl_options(values)["PDL"], shared_memory(values)
        config = default_config(shape, rows, pdl, memory, values.element_size(), scaling.grouped)
    assert config.block_depth == DEPTH == GROUP or not scaling.grouped
    assert config.block_features % FEATURES == 0
    return gemm.tiled_product(config, values, weight.matrix, epilogue, bias, scaling)


def _operand(x: Normed, rounding: Rounding | None) -> tuple[Tensor, Tensor | None]:
    """The rows as a product reads them, and their scales, if they have any."""
    if not isinstance(x, RoundedRows):
        return (x, None) if rounding is None else rounded(x, rounding)
    assert rounding is not None
    assert rounding.is_dynamic
    assert rounding.grouped == (x.scale.dim() == 2)
    return x.values, x.scale


def rounded(
    x: Tensor, rounding: Rounding = BY_ROW, pairs: Tensor | None = None, top_k: int = 1
) -> tuple[Tensor, Tensor]:
    """``fp8.rounded_by`` of a contiguous [T, K] on a GPU, with the same bits.

    With ``pairs`` [rows] int32, each of a row and one of its ``top_k`` choices, the result has a
    row for each pair.
    """
    assert x.is_contiguous()
    rows, width = len(x) if pairs is None else len(pairs), x.shape[1]
    groups = triton.cdiv(width, GROUP) if rounding.grouped else 1
    matrix = x.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    shape = (rows, groups) if rounding.grouped else (rows,)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if rows:
        block = GROUP if rounding.grouped else triton.next_power_of_2(width)
        lines = max(1, _ROUNDED_ELEMENTS // block)
        _round_kernel[(triton.cdiv(rows * groups, lines),)](
            x,
            matrix,
            scale,
            rounding.scale,
            pairs,
            rows * groups,
            width,
            TOP_K=top_k,
            LARGEST=LARGEST,
            POWERS=rounding.powers,
            GROUPS=groups,
            LINES=lines,
            BLOCK=block,
            num_warps=min(32, lines * block // 512),
            **pdl_options(x),
        )
    return matrix, scale


@triton.jit
def _step_of(largest):
    return tl.maximum(largest, _TINY) * _STEP


@triton.jit
def store_rounded(
    out,  # [BLOCK] pointers to float8 e4m3
    scale,  # of the row, written
    value,  # [BLOCK] fp32
    inside,  # [BLOCK]
):
    """Store one row as ``rounded`` makes it ``BY_ROW``."""
    # tl.max skips NaN, which stays NaN in the row.
    step = _step_of(tl.max(tl.where(inside, tl.abs(value), 0.0)))
    tl.store(out, (value * tl.div_rn(1.0, step)).to(out.dtype.element_ty), inside)
    tl.store(scale, step)


@triton.jit
def rounded_lines(value, POWERS: tl.constexpr):
    """Lines [lines, elements] fp32 in units of their scales, and those, [lines, 1]."""
    step = _step_of(tl.max(tl.abs(value), axis=1, keep_dims=True))
    if POWERS:
        step = (step.to(tl.int32, bitcast=True) + _MANTISSA) & _EXPONENT
        step = step.to(tl.float32, bitcast=True)
    return value * tl.div_rn(1.0, step), step


@triton.jit(do_not_specialize=["num_lines"])
def _round_kernel(
    x,  # [rows, width], without pairs
    matrix,  # [rows, width] float8 e4m3, written
    scale,  # [rows, GROUPS], written: of each line
    fixed,  # [], the scale of all lines, or None
    pairs,  # [rows], each of a row of x and one of TOP_K choices; None: rows are those of x
    num_lines,  # rows * GROUPS
    width,
    TOP_K: tl.constexpr,
    LARGEST: tl.constexpr,
    POWERS: tl.constexpr,
    GROUPS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a group
    PDL: tl.constexpr,
):
    """Round LINES groups of rows; the largest of a group is the same in any layout."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)[:, None]
    element = line % GROUPS * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = line // GROUPS
    at = row.to(tl.int64) * width + element
    inside = (line < num_lines) & (element < width)
    gdc_launch_and_wait(PDL)
    if pairs is not None:
        row = tl.load(pairs + row, line < num_lines, other=0) // TOP_K
    value = tl.load(x + row.to(tl.int64) * width + element, inside, other=0.0).to(tl.float32)
    if fixed is not None:
        step = tl.load(fixed)
        value *= tl.div_rn(1.0, step)
        value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    else:
        value, step = rounded_lines(value, POWERS)
    tl.store(matrix + at, value.to(matrix.dtype.element_ty), inside)
    tl.store(scale + line, step, line < num_lines)

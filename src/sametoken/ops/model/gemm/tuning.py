"""The GEMM kernel of each weight shape and row count, by rules.

Every choice gives the same bits (docs/lossless.md), so a rule changes speed only; ``selfcheck``
verifies that on the chip in use. ``benchmarks/kernels/decode_gpu.py`` measures choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Literal, Protocol

from sametoken.ops.hopper import MULTIPROCESSORS
from sametoken.ops.launch_sizes import cdiv

#: Operation on a product before its store; "logits" leaves it in fp32.
Epilogue = Literal["none", "bias", "silu_mul", "logits"]

#: When a product lets the next kernel start: at once, when its sums are done, or when it ends.
Release = Literal["early", "late", "never"]

#: A row count uses the choice of the smallest bucket that holds it, or of the last one.
ROW_BUCKETS = (1, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 2048)

#: Least number of programs for a narrow weight, about one per multiprocessor.
MIN_PROGRAMS = 120

#: A weight with fewer features leaves most of a Hopper's multiprocessors without a large tile.
NARROW = 4608

#: Bytes of a weight's row from which its tiles are shared out evenly among multiprocessors.
LONG = 8192

#: The same from which two tiles of rows are faster in Triton.
LONGEST = 24576


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Shape of a weight in the checkpoint, [out_features, in_features], and its epilogue."""

    out_features: int
    in_features: int
    epilogue: Epilogue = "none"


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Tiles and launch options of the Triton kernel; none affects the bits of the result.

    Attributes:
        block_rows: activation rows per program.
        block_features: weight rows per program (of gate and of up each for ``silu_mul``).
        block_depth: elements of the sum per loop iteration.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        tma: load tiles through tensor descriptors (TMA).
        pdl: start before the previous kernel ends (programmatic dependent launch, compute
            capability 9.0 and up).
        prefetch_bytes: with ``pdl``, bytes of each weight row to prefetch into L2 before the
            wait: a multiple of 16 or 0, capped at the row.
        release: when the next kernel may start.
    """

    block_rows: int
    block_features: int
    block_depth: int
    num_warps: int
    num_stages: int
    tma: bool = False
    pdl: bool = False
    prefetch_bytes: int = 8192
    release: Release = "early"


@dataclass(frozen=True, slots=True)
class StreamedConfig:
    """Tiles of the Hopper kernel of few rows, whose weights wait for no kernel; bits do not change.

    Attributes:
        block_rows: activation rows per program: a power of two of at least 8.
        block_features: weight rows per warp group: 32, 48 or 64; 32 of gate and of up each for
            ``silu_mul``.
        boxes: lines of 128 bytes of a weight's row per loop iteration.
        warp_groups: groups of four warps per program, 1 to 3.
    """

    block_rows: int
    block_features: int
    boxes: int
    warp_groups: int = 1


@dataclass(frozen=True, slots=True)
class CublasConfig:
    """cuBLAS, where it does not use split-K."""


GemmConfig = TritonConfig | StreamedConfig | CublasConfig

#: The kernel whose bits define the result; every other choice must equal it.
CANONICAL = TritonConfig(16, 32, 128, num_warps=4, num_stages=4)

#: Tiles of more than 64 rows on Hopper. Started early they lose 1 to 3 % of a step.
MANY_ROWS = tuple(
    TritonConfig(rows, features, 64, warps, stages, tma=True, release="late")
    for rows, features, warps, stages in (
        (128, 64, 4, 8), (64, 128, 4, 6), (64, 64, 4, 12), (128, 128, 8, 4),
    )
)  # fmt: skip

#: That of prompts' rows, within 2 to 4 % of cuBLAS (benchmarks/results/h200-kernels.md).
_LARGE = TritonConfig(256, 128, 64, 8, 3, tma=True, release="late")

#: fp32 products do not use tensor cores: one small tile for all row counts.
FLOAT32 = TritonConfig(16, 32, 32, num_warps=4, num_stages=2)


class GemmChooser(Protocol):
    """Chooses the kernel of a shape and row count."""

    def choose(self, shape: GemmShape, rows: int) -> GemmConfig:
        """The kernel for ``rows`` rows of activations."""
        ...


@dataclass(frozen=True, slots=True)
class GemmTable:
    """Choices by shape and row bucket.

    Attributes:
        entries: choices other than ``default_config``, or found to keep the law.
        hopper: as for ``default_config``.
    """

    entries: Mapping[GemmShape, Mapping[int, GemmConfig]] = field(default_factory=dict)
    hopper: bool = False

    def choose(self, shape: GemmShape, rows: int) -> GemmConfig:
        """The kernel for ``rows`` rows of activations."""
        chosen = self.entries.get(shape, {}).get(row_bucket(rows))
        return chosen if chosen is not None else default_config(shape, rows, self.hopper)

    def in_order(self, shape: GemmShape, rows: int) -> TritonConfig:
        """The default for row counts at which cuBLAS does not serve."""
        return in_order_config(shape, rows, self.hopper)

    def replaced(self, shape: GemmShape, bucket: int, config: GemmConfig) -> GemmTable:
        """This table with another choice for one bucket of one shape."""
        choices = {**self.entries.get(shape, {}), bucket: config}
        return replace(self, entries={**self.entries, shape: choices})


def row_bucket(rows: int) -> int:
    """The bucket of a row count."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])


@lru_cache(maxsize=1024)
def default_config(shape: GemmShape, rows: int, hopper: bool) -> GemmConfig:
    """The kernel of a shape by rule.

    Args:
        shape: of the product.
        rows: of activations.
        hopper: the chip has the wgmma, TMA and programmatic launches of a Hopper.
    """
    if not hopper:
        return in_order_config(shape, rows, hopper)
    streamed = streamed_config(shape, rows, 2)
    if streamed is not None:
        return streamed
    if rows <= 64 or _fills_rounds(shape, row_bucket(rows)):
        return in_order_config(shape, rows, hopper)
    return CublasConfig()


def _fills_rounds(shape: GemmShape, rows: int) -> bool:
    """Whether tiles of a gated product keep all multiprocessors busy: then they beat cuBLAS."""
    if shape.epilogue != "silu_mul" or shape.in_features % 8 or rows not in (128, 256):
        return False
    tiles = cdiv(rows, 128) * cdiv(shape.out_features // 2, 128)
    return tiles > 0.8 * cdiv(tiles, MULTIPROCESSORS) * MULTIPROCESSORS


def streamed_config(
    shape: GemmShape, rows: int, element_bytes: int, *, grouped: bool = False
) -> StreamedConfig | None:
    """The Hopper kernel of few rows; None for other shapes, and for rows of which others win.

    Tuned inside whole decode steps, all products together (benchmarks/kernels/decode_gpu.py).

    Args:
        shape: of the product.
        rows: of activations.
        element_bytes: of activations and weights: 2, or 1 for float8.
        grouped: of float8, with scales of groups.
    """
    gated, row_bytes = shape.epilogue == "silu_mul", shape.in_features * element_bytes
    features = shape.out_features // (2 if gated else 1)
    if row_bytes % 16 or (gated and features % 8):
        return None
    if grouped and rows > 32:
        return _streamed_of_groups(features, rows, gated=gated)
    if rows > (128 if element_bytes > 1 else 32):
        return None
    if rows > 64:
        return _streamed_of_many(features, row_bytes, gated=gated)
    block = next(size for size in (8, 16, 32, 64) if rows <= size)
    if gated:
        few = row_bytes < LONG or block == 8 or grouped
        groups = 1 if few else _evenest(features, [96, 64, 32]) // 32
        return StreamedConfig(block, 32, boxes=2, warp_groups=groups)
    widths = [64] if row_bytes < LONG else [64, 32] if block == 32 else [64, 48, 32]
    width = _evenest(features, widths)
    return StreamedConfig(block, width, boxes=4 if width == 32 and block <= 32 else 2)


def _streamed_of_many(features: int, row_bytes: int, *, gated: bool) -> StreamedConfig | None:
    """Of 65 to 128 rows, where other tiles leave many multiprocessors idle."""
    if gated:
        serves = 0.45 * MULTIPROCESSORS < cdiv(features, 96) <= MULTIPROCESSORS
        return StreamedConfig(128, 32, boxes=1, warp_groups=3) if serves else None
    # Two tiles of rows give twice as many programs to a narrow weight.
    serves = features < NARROW and row_bytes < LONGEST
    return StreamedConfig(64, 64, boxes=2) if serves else None


def _streamed_of_groups(features: int, rows: int, *, gated: bool) -> StreamedConfig | None:
    """Of float8 with scales of groups: small tiles while all of them run at once."""
    width = 32 if gated else 64
    for block in (32, 64):
        if cdiv(row_bucket(rows), block) * cdiv(features, width) <= MULTIPROCESSORS:
            return StreamedConfig(block, width, boxes=2) if rows <= ROW_BUCKETS[-1] else None
    return StreamedConfig(64, width, boxes=2) if rows <= 64 else None


def _evenest(features: int, widths: Sequence[int]) -> int:
    """The width of tiles that keeps the busiest multiprocessor busy for the shortest time."""
    return min(widths, key=lambda width: cdiv(cdiv(features, width), MULTIPROCESSORS) * width)


def in_order_config(shape: GemmShape, rows: int, hopper: bool) -> TritonConfig:
    """The Triton kernel of such shapes; arguments as for ``default_config``."""
    gated = shape.epilogue == "silu_mul"
    # TMA reads rows that begin at multiples of 16 bytes.
    if rows > 64 and hopper and shape.in_features % 8 == 0:
        if gated:
            return TritonConfig(128, 128, 64, 8, 4, tma=True, release="never")
        return _soonest(MANY_ROWS, shape.out_features, row_bucket(rows))
    if rows > 64:
        return TritonConfig(128, 64, 64, num_warps=8 if gated else 4, num_stages=3)
    programs = shape.out_features // (2 if gated else 1)
    widths = (width for width in (64, 32) if programs // width >= MIN_PROGRAMS)
    width = next(widths, 16)
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    depth = 256 if width <= 32 and block_rows <= 32 else 128
    return TritonConfig(block_rows, width, depth, num_warps=4, num_stages=3)


def scaled_config(shape: GemmShape, rows: int, element_bytes: int, *, hopper: bool) -> TritonConfig:
    """Of products whose sums have factors, which cuBLAS does not know; likewise."""
    if element_bytes == 4:
        return FLOAT32
    config = in_order_config(shape, rows, hopper)
    if config in MANY_ROWS:
        return _soonest((*MANY_ROWS, _LARGE), shape.out_features, row_bucket(rows))
    return config


@cache
def _soonest(tiles: tuple[TritonConfig, ...], features: int, rows: int) -> TritonConfig:
    """The tile whose programs on one multiprocessor load the fewest bytes, in rounds of them all.

    L2 bounds products of these row counts: a tile loads its rows and its features.
    """

    def loaded(tile: TritonConfig) -> int:
        count = cdiv(rows, tile.block_rows) * cdiv(features, tile.block_features)
        return cdiv(count, MULTIPROCESSORS) * (tile.block_rows + tile.block_features)

    return min(tiles, key=loaded)

"""Products with integer weights on a GPU: those of the matrix of elements, rounded to x's dtype.

Elements for few rows of 16 bits (``FEW_ROWS``; more in ``int4_hopper``) are made in registers,
else in memory; either way the products of a row are added in order, so the bits are those of
``gemm.product``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.hopper import MULTIPROCESSORS, shared_memory
from sametoken.ops.model.activation_triton import activated
from sametoken.ops.model.gemm import int4_hopper
from sametoken.ops.model.gemm.int4_panels import BLOCK, ONE, Int4Panels, gate_and_up, int4_sums
from sametoken.ops.model.gemm.product import product as product_of_matrix
from sametoken.ops.model.gemm.triton import (
    Scaling,
    epilogue_of,
    launch_and_prefetch,
    output_of,
    tiled_product,
)
from sametoken.ops.model.gemm.tuning import (
    FLOAT32,
    Epilogue,
    GemmChooser,
    GemmShape,
    GemmTable,
    StreamedConfig,
    scaled_config,
)
from sametoken.ops.pdl import gdc_wait, pdl_options, supports_pdl
from sametoken.ops.weight import Int4Matrix, IntegerMatrix

#: Above these rows, the matrix is expanded in memory once rather than in every tile of rows.
FEW_ROWS = 192


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Int4DeviceWeight:
    """``UnquantizedWeight`` of an ``Int4Matrix`` or ``IntegerMatrix`` on a GPU.

    Attributes:
        panels: the matrix.
        order: as in ``Int4Matrix``.
        table: the kernel of each row count whose elements are made in memory.
        dtype: of rows.
    """

    panels: Int4Panels
    order: Tensor | None
    table: GemmChooser
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(
        cls,
        matrix: Int4Matrix | IntegerMatrix,
        table: GemmChooser | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Int4DeviceWeight:
        """Take over a matrix."""
        order = matrix.order if isinstance(matrix, Int4Matrix) else None
        return cls(Int4Panels.of(matrix, dtype), order, table or GemmTable(), dtype)

    @property
    def out_features(self) -> int:
        """N."""
        return self.panels.out_features

    @property
    def in_features(self) -> int:
        """K."""
        return self.panels.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, and zeros, minima or factors."""
        return self.panels.nbytes

    @property
    def num_expanded(self) -> int:
        """See ``ExpandedWeight``."""
        return self.out_features * self.in_features

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._product(x, epilogue_of(bias, out_dtype), bias)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return self._product(x, "silu_mul")

    def cut(self, token_ids: Tensor) -> Int4DeviceWeight:
        """See ``CutWeight``."""
        return replace(self, panels=self.panels.cut(token_ids))

    def rows(self, token_ids: Tensor) -> Tensor:
        rows = self.panels.expanded(self.dtype, token_ids)
        if self.panels.factors is not None:
            rows = (rows.float() * self.panels.factors[token_ids, None]).to(self.dtype)
        return rows if self.order is None else rows[:, self.order.argsort()]

    def quantize_fp8(self) -> Int4DeviceWeight:
        return self

    def _product(self, x: Tensor, epilogue: Epilogue, bias: Tensor | None = None) -> Tensor:
        if self.order is not None:
            x = x[:, self.order]
        if x.dtype != torch.float32:
            if x.shape[0] <= int4_hopper.FEW_ROWS and int4_hopper.serves(self.panels, x.dtype):
                return int4_hopper.product(x, self.panels, epilogue, bias)
            if x.shape[0] <= FEW_ROWS:
                return product(x, self.panels, epilogue, bias)
        shape = GemmShape(self.out_features, self.in_features, epilogue)
        matrix = self.panels.expanded(x.dtype)
        if self.panels.factors is not None:
            scaling = Scaling(self.panels.factors, None, x.dtype)
            tiles = scaled_config(shape, x.shape[0], x.dtype.itemsize, hopper=supports_pdl(x))
            return tiled_product(tiles, x, matrix, epilogue, bias, scaling)
        config = FLOAT32 if x.dtype == torch.float32 else self.table.choose(shape, x.shape[0])
        # The matrix is written by the kernel before, and that one would not wait for it.
        assert not isinstance(config, StreamedConfig)
        return product_of_matrix(config, x, matrix, epilogue, bias)


@dataclass(frozen=True, slots=True)
class Int4Config:
    """Tiles and launch options of the kernel for few rows; none affects the bits.

    Attributes:
        block_rows: activation rows per program.
        block_features: weight rows per program, a multiple of 64; half of them of up in a gated
            product.
        unroll: blocks of 128 features per loop iteration.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        prefetch_bytes: as in ``TritonConfig``.
    """

    block_rows: int
    block_features: int = 64
    unroll: int = 2
    num_warps: int = 4
    num_stages: int = 4
    prefetch_bytes: int = 0


def default_config(panels: Int4Panels, rows: int, memory: int, itemsize: int = 2) -> Int4Config:
    """The kernel for a matrix.

    Args:
        panels: the matrix.
        rows: number of activation rows.
        memory: bytes of shared memory per program.
        itemsize: bytes of an element of the activations.
    """
    block_rows = next((size for size in (16, 32) if rows <= size), 64)
    # Each tile has a multiprocessor to itself, and all of its shared memory.
    num_tiles = panels.out_features // 64 * triton.cdiv(rows, block_rows)
    alone = num_tiles <= MULTIPROCESSORS
    blocks = panels.words.shape[-1] // 16
    most_unrolled = 1 if block_rows == 64 else 4 if alone else 2
    unroll = next(count for count in (4, 2, 1) if count <= most_unrolled and blocks % count == 0)
    stage_bytes = unroll * (64 * panels.block_bytes + BLOCK * itemsize * block_rows)
    # Alone, 16 blocks are on their way; else three programs of 64 rows hide more than a stage.
    most = min(8, 16 // unroll) if alone else 3 if block_rows == 64 else 4
    stages = max(2, min(most, (memory if alone else memory // 2) // stage_bytes))
    return Int4Config(
        block_rows, unroll=unroll, num_stages=stages, prefetch_bytes=1024 if alone else 0
    )


def product(
    x: Tensor,
    panels: Int4Panels,
    epilogue: Epilogue = "none",
    bias: Tensor | None = None,
    config: Int4Config | None = None,
) -> Tensor:
    """One product by the kernel for few rows; ``epilogue`` and ``bias`` as in ``gemm.product``.

    Args:
        x: [T, K], contiguous.
        panels: of [N, K].
        epilogue, bias: see above.
        config: by default ``default_config``.
    """
    assert x.is_contiguous()
    rows, in_features = x.shape
    assert in_features == panels.in_features
    out = output_of(x, panels.out_features, epilogue, x.dtype)
    gated, out_features = epilogue == "silu_mul", out.shape[1]
    if not rows:
        return out
    config = config or default_config(panels, rows, shared_memory(x), x.dtype.itemsize)
    num_words = panels.words.shape[1]
    unroll = config.unroll if num_words % (16 * config.unroll) == 0 else 1
    # Hopper's smaller instructions add in another order: tiles of 32 had other bits.
    assert config.block_features % 64 == 0
    own = config.block_features // (2 if gated else 1)
    programs = triton.cdiv(rows, config.block_rows) * triton.cdiv(out_features, own)
    _int4_kernel[(programs,)](
        x,
        panels.words,
        panels.tops,
        panels.kernel_scales,
        panels.factors,
        panels.offsets,
        bias,
        out,
        rows,
        out_features,
        in_features,
        num_words,
        ONE,
        GATED=gated,
        WIDTH=panels.width,
        E2M1=panels.e2m1_kind,
        FUSED=panels.fused,
        UNROLL=unroll,
        EVEN=in_features % BLOCK == 0,
        PREFETCH_BYTES=min(config.prefetch_bytes, 4 * num_words),
        PIECES=max(1, 32 * config.num_warps // config.block_features),
        BLOCK_ROWS=config.block_rows,
        BLOCK_FEATURES=config.block_features,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(x),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _int4_kernel(
    x,  # [rows, in_features]
    words,  # [out_features or twice as many, num_words]: ``Int4Panels``
    tops,  # likewise, or None
    scales,  # [groups, likewise]
    factors,  # [likewise], or None
    offsets,  # as scales, or None
    bias,  # [out_features], or None
    out,  # [rows, out_features], written
    rows,
    out_features,
    in_features,
    num_words,
    one,  # the bits of 1.0
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    E2M1: tl.constexpr,
    FUSED: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    OWN: tl.constexpr = BLOCK_FEATURES // 2 if GATED else BLOCK_FEATURES
    # Neighbouring programs share a weight tile, so that it is read from memory once.
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    row = (tl.program_id(0) % row_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = (tl.program_id(0) // row_tiles) * OWN
    if PDL:
        place = tl.arange(0, BLOCK_FEATURES)
        w_row = tl.minimum(first + place % OWN, out_features - 1) + place // OWN * out_features
        w_start = words + w_row.to(tl.int64) * num_words
        launch_and_prefetch(w_start, 0, "none", True, PREFETCH_BYTES, PIECES)
        gdc_wait(True)
    is_row = row < rows
    acc = int4_sums(
        x + row.to(tl.int64)[:, None] * in_features, is_row, words, tops, scales, factors,
        offsets, first, out_features, in_features, num_words, one,
        GATED, WIDTH, E2M1, FUSED, UNROLL, EVEN, BLOCK_FEATURES,
    )  # fmt: skip
    dtype = out.dtype.element_ty
    feature = first + tl.arange(0, OWN)
    is_feature = feature < out_features
    if GATED:
        acc, up = gate_and_up(acc)
        acc = activated(acc, up, dtype, "silu_mul")
    if bias is not None:
        acc += tl.load(bias + feature, is_feature, other=0.0)[:, None]
    at = out + row.to(tl.int64)[None, :] * out_features + feature[:, None]
    tl.store(at, acc.to(dtype), is_row[None, :] & is_feature[:, None])

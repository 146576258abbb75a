"""Matrix products in Triton: a kernel of any tiles, with the same bits.

It adds over in_features in order.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.activation_triton import activated
from sametoken.ops.model.gemm.tuning import Epilogue, TritonConfig
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, prefetch_l2, supports_pdl
from sametoken.ops.triton_versions import FUSED

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def sums(
    x_tiles,
    first_row,
    x_at,  # [rows, depth] pointers
    row_present,
    w_tiles,
    first_feature,
    w_at,  # [features, depth] pointers
    present,
    half,
    out_features,
    in_features,
    w_scales,  # [features] pointers to scales of groups of DEPTH features, or None
    up_scales,
    x_scales,  # [rows] likewise, or None
    EPILOGUE: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    W_STEP: tl.constexpr,
    X_STEP: tl.constexpr,
):
    """The tile's sums over in_features, and for silu_mul those of up: [features, rows] fp32.

    Sums of a group are multiplied by its scales, if any; scales are W_STEP and X_STEP apart.
    """
    DEPTH: tl.constexpr = w_at.shape[1]
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([w_at.shape[0], x_at.shape[0]], tl.float32)
    up = acc
    for k in tl.range(0, in_features, DEPTH):
        inside = k + depth < in_features
        x_tile = _tile(x_tiles, first_row, x_at, k, row_present, inside, EVEN_DEPTH)
        w_tile = _tile(w_tiles, first_feature, w_at, k, present, inside, EVEN_DEPTH)
        group = k // DEPTH
        w_scale, up_scale, x_scale = None, None, None
        if w_scales is not None:
            w_scale = tl.load(w_scales + group * W_STEP, mask=present, other=0)
        if x_scales is not None:
            x_scale = tl.load(x_scales + group * X_STEP, mask=row_present, other=0)
        acc = with_products(acc, w_tile, x_tile, w_scale, x_scale)
        if EPILOGUE == "silu_mul":
            first_up = out_features + first_feature
            w_tile = _tile(w_tiles, first_up, w_at + half, k, present, inside, EVEN_DEPTH)
            if up_scales is not None:
                up_scale = tl.load(up_scales + group * W_STEP, mask=present, other=0)
            up = with_products(up, w_tile, x_tile, up_scale, x_scale)
    return acc, up


@triton.jit
def _tile(tiles, first, at, k, present, inside, EVEN_DEPTH: tl.constexpr):
    """Load a tile [rows, depth]; absent rows and elements are zero."""
    if tiles is not None:
        return tiles.load([first, k])
    if EVEN_DEPTH:
        return tl.load(at + k, mask=present[:, None], other=0.0)
    return tl.load(at + k, mask=present[:, None] & inside[None, :], other=0.0)


@triton.jit
def with_products(acc, w_tile, x_tile, w_scale, x_scale):
    """``acc + w_tile @ x_tile.T``, times scales of the group, if any: [features, rows] fp32.

    Without groups the tensor cores' sum runs on from tile to tile, of float8 too.
    """
    # Exact: every float8 number is one of the wider formats.
    WIDENED: tl.constexpr = w_tile.dtype != x_tile.dtype
    w_tile = w_tile.to(x_tile.dtype)
    if w_scale is None:
        acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
        if WIDENED:
            acc = finished(acc)
    else:
        products = tl.dot(w_tile, x_tile.T, input_precision="ieee")
        if x_scale is not None:
            products *= w_scale[:, None] * x_scale[None, :]
        else:
            products *= w_scale[:, None]
        acc += products
    return acc


@triton.jit
def finished(sums):
    """The same sums, once all products in them are done: for products whose left operand was made.

    The matrix unit reads that operand's registers while it works. Triton would go on, and make the
    next operand in them (triton-lang/triton#9433), if nothing used the sums before.
    """
    if _INTERPRETED:
        return sums
    else:
        return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def launch_and_prefetch(
    w_row,
    half,
    EPILOGUE: tl.constexpr,
    RELEASE: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Trigger the next kernel and prefetch weights while the previous kernel still runs."""
    gdc_launch_dependents(RELEASE)
    if PREFETCH_BYTES:
        _prefetch(w_row, PREFETCH_BYTES, PIECES)
        if EPILOGUE == "silu_mul":
            _prefetch(w_row + half, PREFETCH_BYTES, PIECES)


@triton.jit
def _prefetch(w_row, BYTES: tl.constexpr, PIECES: tl.constexpr):
    """Prefetch the first BYTES of each row into L2: [n] pointers, 16-byte aligned.

    One piece per thread where pieces fit; threads past the rows would repeat a prefetch.
    """
    if BYTES % (16 * PIECES) == 0:
        piece = tl.arange(0, PIECES)[None, :] * (BYTES // PIECES)
        prefetch_l2(w_row[:, None].to(tl.int64) + piece, BYTES // PIECES)
    else:
        prefetch_l2(w_row.to(tl.int64), BYTES)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scales of operands of which at least the matrix is float8.

    Attributes:
        features: fp32, scales of the matrix: [N], or [N, groups] by row and 128 features.
        rows: fp32, those of the activations likewise; None: they are not rounded.
        dtype: of the result, except logits.
    """

    features: Tensor
    rows: Tensor | None
    dtype: torch.dtype

    @property
    def grouped(self) -> bool:
        """Whether sums are multiplied by scales group by group."""
        return self.features.dim() == 2 or (self.rows is not None and self.rows.dim() == 2)


def epilogue_of(bias: Tensor | None, out_dtype: torch.dtype | None) -> Epilogue:
    """The epilogue of ``Weight.matmul`` with these arguments."""
    assert out_dtype in (None, torch.float32)
    assert bias is None or out_dtype is None
    if out_dtype is not None:
        return "logits"
    return "none" if bias is None else "bias"


def tiled_product(
    config: TritonConfig,
    x: Tensor,
    matrix: Tensor,
    epilogue: Epilogue,
    bias: Tensor | None,
    scaling: Scaling | None = None,
) -> Tensor:
    """``gemm.product`` by this kernel, which also takes float8 e4m3 operands.

    Those have a ``scaling``, applied before the epilogue; their bits depend on
    ``config.block_depth`` and no other field.
    """
    dtype = x.dtype if scaling is None else scaling.dtype
    out = output_of(x, matrix.shape[0], epilogue, dtype)
    (rows, out_features), in_features = out.shape, x.shape[1]
    row_bytes = in_features * matrix.element_size()
    if not rows:
        return out
    x_tiles = w_tiles = None
    if config.tma:
        x_tiles = TensorDescriptor.from_tensor(x, [config.block_rows, config.block_depth])
        w_tiles = TensorDescriptor.from_tensor(matrix, [config.block_features, config.block_depth])
    programs = cdiv(rows, config.block_rows) * cdiv(out_features, config.block_features)
    launch = FUSED | {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.pdl:
        launch["launch_pdl"] = True
    _product_kernel[(programs,)](
        x,
        matrix,
        x_tiles,
        w_tiles,
        bias,
        None if scaling is None else scaling.features,
        None if scaling is None else scaling.rows,
        out,
        rows,
        out_features,
        in_features,
        EPILOGUE=epilogue,
        PDL=config.pdl,
        RELEASE=config.release if supports_pdl(x) else "never",
        PREFETCH_BYTES=0 if row_bytes % 16 else min(config.prefetch_bytes, row_bytes),
        PIECES=max(1, 32 * config.num_warps // config.block_features),
        EVEN_DEPTH=in_features % config.block_depth == 0,
        W_GROUPS=groups_of(None if scaling is None else scaling.features),
        X_GROUPS=groups_of(None if scaling is None else scaling.rows),
        GROUPED=scaling is not None and scaling.grouped,
        BLOCK_ROWS=config.block_rows,
        BLOCK_FEATURES=config.block_features,
        BLOCK_DEPTH=config.block_depth,
        **launch,
    )
    return out


def output_of(x: Tensor, num_features: int, epilogue: Epilogue, dtype: torch.dtype) -> Tensor:
    """Memory of a product's result.

    Args:
        x: [T, K].
        num_features: rows of the weight, of a gated product twice as many as the result's.
        epilogue: of the product.
        dtype: of the result, except of logits.
    """
    out_features = num_features // 2 if epilogue == "silu_mul" else num_features
    dtype = torch.float32 if epilogue == "logits" else dtype
    return torch.empty(x.shape[0], out_features, dtype=dtype, device=x.device)


def groups_of(scale: Tensor | None) -> int:
    """The scales of each row."""
    return 1 if scale is None or scale.dim() == 1 else scale.shape[1]


@triton.jit
def first_row_of(tile, rows, ROWS: tl.constexpr):
    """The first row of a tile of ROWS, of which the last ends with the last row.

    TMA takes longer over rows that do not exist than over those of two tiles (docs/LOG.md).
    """
    return tl.minimum(tile * ROWS, tl.maximum(rows - ROWS, 0))


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,  # [rows, in_features]
    weight,  # [out_features, in_features]; [2 * out_features, in_features] for silu_mul
    x_tiles,  # tensor descriptors, each None where tiles are loaded through pointers
    w_tiles,
    bias,  # [out_features], or None
    feature_scales,  # [weight's rows, W_GROUPS], or None
    row_scales,  # [rows, X_GROUPS], or None
    out,  # [rows, out_features]
    rows,
    out_features,
    in_features,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
    RELEASE: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    W_GROUPS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    # Neighbouring programs share a weight tile, so that it is read from memory once.
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    first_row = first_row_of(tl.program_id(0) % row_tiles, rows, BLOCK_ROWS)
    first_feature = (tl.program_id(0) // row_tiles) * BLOCK_FEATURES
    row, feature = (
        first_row + tl.arange(0, BLOCK_ROWS),
        first_feature + tl.arange(0, BLOCK_FEATURES),
    )
    depth = tl.arange(0, BLOCK_DEPTH)
    w_row = weight + feature.to(tl.int64) * in_features
    half = tl.cast(out_features, tl.int64) * in_features
    is_feature, is_row = feature < out_features, row < rows

    if PDL:
        w_start = tl.where(is_feature, w_row, weight)
        launch_and_prefetch(w_start, half, EPILOGUE, RELEASE == "early", PREFETCH_BYTES, PIECES)
    # Scales are loaded before the sums, whose end would wait for them.
    w_scale, up_scale, x_scale, w_scales, up_scales, x_scales = None, None, None, None, None, None
    if feature_scales is not None:
        w_scales = feature_scales + feature * W_GROUPS
        up_scales = w_scales + out_features * W_GROUPS
        if not GROUPED:
            w_scale = tl.load(w_scales, mask=is_feature, other=0)
            if EPILOGUE == "silu_mul":
                up_scale = tl.load(up_scales, mask=is_feature, other=0)
    gdc_wait(PDL)
    if row_scales is not None:
        x_scales = row_scales + row * X_GROUPS
        if not GROUPED:
            x_scale = tl.load(x_scales, mask=is_row, other=0)

    x_at = x + row.to(tl.int64)[:, None] * in_features + depth[None, :]
    w_at = w_row[:, None] + depth[None, :]
    acc, up = sums(
        x_tiles, first_row, x_at, is_row, w_tiles, first_feature, w_at, is_feature,
        half, out_features, in_features, w_scales if GROUPED else None,
        up_scales if GROUPED else None, x_scales if GROUPED else None,
        EPILOGUE, EVEN_DEPTH,
        1 if W_GROUPS > 1 else 0, 1 if X_GROUPS > 1 else 0,
    )  # fmt: skip
    gdc_launch_dependents(RELEASE == "late")

    at = row.to(tl.int64)[None, :] * out_features + feature[:, None]
    dtype = out.dtype.element_ty
    if w_scale is not None:
        acc = scaled(acc, w_scale, x_scale)
        if EPILOGUE == "silu_mul":
            up = scaled(up, up_scale, x_scale)
    if EPILOGUE == "bias":
        acc += tl.load(bias + feature, mask=is_feature, other=0)[:, None]
    elif EPILOGUE == "silu_mul":
        acc = activated(acc, up, dtype, EPILOGUE)
    tl.store(out + at, acc.to(dtype), mask=is_row[None, :] & is_feature[:, None])


@triton.jit
def scaled(acc, w_scale, x_scale):
    """Sums [features, rows] times scales of the features and, if not None, of the rows."""
    factor = w_scale[:, None]
    if x_scale is not None:
        factor *= x_scale[None, :]
    return acc * factor

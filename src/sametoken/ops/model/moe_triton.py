"""The weighted sum of a row's experts in Triton; no shape depends on the routing.

Rows are grouped by expert on the device (``moe_rows_triton``) unless they are very few; a program
then has a share of one expert's rows and loops over its tiles. Neighbouring programs share rows,
then weights, so that both are read from memory once. Sums over features run in order, as in
``gemm``, so a row's bits depend neither on the tiles (``moe_tiles``) nor on the other rows of the
same expert.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sametoken.ops.hopper import has_hoppers_memory
from sametoken.ops.model import moe_blocks_hopper, moe_panels_hopper
from sametoken.ops.model.activation_triton import Activation, activated
from sametoken.ops.model.gemm.fp8_triton import rounded
from sametoken.ops.model.gemm.int4_panels import ONE, Int4Panels, gate_and_up, int4_sums
from sametoken.ops.model.gemm.triton import finished, groups_of
from sametoken.ops.model.moe_rows_triton import (
    AddToPairs,
    LonePairs,
    RowGroups,
    combine,
    group_at,
    pairs_at,
)
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_sums_triton import scaled_sums
from sametoken.ops.model.moe_tiles import ExpertTile, expert_tile, panels_tile
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options, supports_pdl
from sametoken.ops.weight import ClampedExperts, ExpertForm


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StackedExperts:
    """The experts of a layer on the GPU.

    Attributes:
        gate_up: of [2 * I, H], gate first; of [I, H], up alone, for experts without gates.
        down: of [H, I].
        form: what they have in place of silu's gate without biases; None: nothing.
    """

    gate_up: ExpertStack | Int4Panels
    down: ExpertStack | Int4Panels
    form: ExpertForm | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return _matrix(self.down).shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, scales and biases."""
        parts = (self.gate_up, self.down, self.form)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        out_dtype: torch.dtype | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:
        """See ``moe_forward``."""
        return moe_forward(x, self, chosen, weights, out_dtype, beside)


@triton.jit
def _with_biases(acc, up, biases, expert, feature, N: tl.constexpr, GATED: tl.constexpr):
    """Add an expert's biases, and with GATED those of up.

    Sums are finished before: of those that one tile holds whole, the compiler would let the matrix
    unit begin with the bias.
    """
    own = biases + expert * (2 * N if GATED else N) + feature
    acc = finished(acc) + tl.load(own, feature < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up = finished(up) + tl.load(own + N, feature < N, other=0.0).to(tl.float32)[:, None]
    return acc, up


@triton.jit
def _store(
    acc,  # [features, rows] fp32, as are those of up
    up,
    biases,  # as for ``_expert_kernel``, as are all others
    expert,
    out,
    out_row,
    is_pair,
    feature,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Store finished sums, after their activation if it is not put off."""
    if biases is not None:
        acc, up = _with_biases(acc, up, biases, expert, feature, N, GATED)
    dtype = out.dtype.element_ty
    if ACTIVATION != "none" and ACTIVATION != "put_off":
        acc = activated(acc, up, dtype, ACTIVATION, ALPHA, LIMIT)
    stored = (feature < N)[:, None] & is_pair[None, :]
    at = out + out_row[None, :] * (2 * N if ACTIVATION == "put_off" else N) + feature[:, None]
    tl.store(at, acc.to(dtype), stored)
    if ACTIVATION == "put_off":
        tl.store(at + N, up.to(dtype), stored)


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_kernel(
    x,  # [rows, K]; see GATHER
    x_tiles,  # tensor descriptors, each None where tiles are loaded through pointers
    weight,  # [E, N, K]; [E, 2 * N, K] before a gate; in 4 bits ``Int4Panels.words``
    w_tiles,
    w_scales,  # [E, N or 2 * N, W_GROUPS], or None; in 4 bits ``Int4Panels.kernel_scales``
    w_factors,  # of 4 bits, ``Int4Panels.factors``, or None
    w_zeros,  # of 4 bits, as scales, or None
    x_scales,  # [rows, X_GROUPS], or None
    biases,  # [E, N or 2 * N], or None
    experts,  # ``tensors`` of ``RowGroups`` or ``LonePairs``, as are the next three
    counts,
    starts,
    members,
    out,  # [num_pairs, N], written; see GATHER
    num_pairs,
    one,  # as for ``int4_sums``
    N: tl.constexpr,
    K: tl.constexpr,
    GATHER: tl.constexpr,  # pairs of each row of x; out's rows lie by expert. 0: the reverse
    ACTIVATION: tl.constexpr,  # as for ``activated``; "none"; "put_off": out is [num_pairs, 2 * N]
    W_GROUPS: tl.constexpr,  # in 4 bits, rows of the scales of an expert
    X_GROUPS: tl.constexpr,
    WORDS: tl.constexpr,  # of a row in 4 bits, else 0
    WIDTH: tl.constexpr,  # features of a group in 4 bits
    E2M1: tl.constexpr,  # ``Int4Panels.e2m1_kind``
    FUSED: tl.constexpr,  # as in ``Int4Panels``
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ALPHA: tl.constexpr,  # of "clamped_swiglu", as is LIMIT
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != "relu_squared" and ACTIVATION != "none"
    gdc_launch_and_wait(PDL)
    expert, count, start = group_at(tl.program_id(2), experts, counts, starts)
    first_feature = tl.program_id(0) * BLOCK_FEATURES
    feature = first_feature + tl.arange(0, BLOCK_FEATURES)
    rows = expert * (2 * N if GATED else N)
    weight += rows * (WORDS if WORDS else K)
    if w_scales is not None:
        w_scales += rows * W_GROUPS
    if w_factors is not None:
        w_factors += rows
    if w_zeros is not None:
        w_zeros += rows * W_GROUPS
    if members is not None:
        members += expert * num_pairs
    step = tl.num_programs(1) * BLOCK_ROWS
    for first in range(tl.program_id(1) * BLOCK_ROWS, count, step):
        member = first + tl.arange(0, BLOCK_ROWS)
        is_pair = member < count
        pair, place = pairs_at(member, is_pair, start, members)
        x_row, out_row = (pair // GATHER, place) if GATHER else (place, pair)
        if WORDS:
            acc = int4_sums(
                x + x_row[:, None] * K, is_pair, weight, None, w_scales, w_factors, w_zeros,
                first_feature, N, K, WORDS, one,
                GATED, WIDTH, E2M1, FUSED, 1, K % 128 == 0,
                BLOCK_FEATURES * 2 if GATED else BLOCK_FEATURES,
            )  # fmt: skip
            up = acc
            if GATED:
                acc, up = gate_and_up(acc)
        else:
            acc, up = scaled_sums(
                x, x_tiles, start + first, x_row, is_pair,
                weight, w_tiles, rows.to(tl.int32) + first_feature, feature, feature < N,
                w_scales, x_scales, GATED, N, K, BLOCK_DEPTH, W_GROUPS, X_GROUPS,
            )  # fmt: skip
        _store(
            acc, up, biases, expert, out, out_row, is_pair, feature,
            N, GATED, ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip


def moe_forward(
    x: Tensor,
    experts: StackedExperts,
    chosen: Tensor,
    weights: Tensor,
    dtype: torch.dtype | None = None,
    beside: Tensor | None = None,
    updates: tuple[AddToPairs, AddToPairs] | None = None,
) -> Tensor:
    """Weighted sum of every row's experts, added by rank in fp32: [T, H] -> [T, H].

    Expert outputs are rounded to the result's dtype first; gate and up to x's.

    Args:
        x: [T, H].
        experts: E experts.
        chosen: [T, top_k] int64, below E.
        weights: [T, top_k] fp32.
        dtype: of the result; default x's.
        beside: [T, H] in that dtype, added to the rounded sum; None: nothing.
        updates: each adds to the results of a product, before what follows it.
    """
    num_rows = len(chosen)
    matrices = _matrix(experts.gate_up), _matrix(experts.down)
    assert all(tensor.is_contiguous() for tensor in (x, *matrices, chosen, weights))
    assert x.shape == (num_rows, experts.down.out_features)
    out = torch.empty_like(x, dtype=dtype)
    if not num_rows:
        return out
    lone = LonePairs.of(chosen, experts.num_experts) if updates is None else None
    rows = lone or RowGroups.of(chosen, experts.num_experts)
    outputs = None
    if isinstance(rows, RowGroups) and updates is None:
        outputs = _outputs_on_hopper(x, experts, rows, out.dtype)
    if outputs is None:
        outputs = _outputs(x, experts, rows, out.dtype, updates)
    combine(outputs, weights, out, beside)
    return out


def _outputs_on_hopper(
    x: Tensor, experts: StackedExperts, rows: RowGroups, dtype: torch.dtype
) -> Tensor | None:
    """As ``_outputs``, of many rows; None where other kernels serve."""
    stacks = experts.gate_up, experts.down
    if isinstance(experts.gate_up, Int4Panels):
        follows, biases = _activation_of(experts), _biases(experts)
        return moe_panels_hopper.outputs(x, *stacks, biases, rows, dtype, follows)
    if experts.form is not None:
        return None
    return moe_blocks_hopper.outputs(x, *stacks, rows, dtype)


def _outputs(
    x: Tensor,
    experts: StackedExperts,
    rows: RowGroups | LonePairs,
    dtype: torch.dtype,
    updates: tuple[AddToPairs, AddToPairs] | None,
) -> Tensor:
    """Outputs of the experts of all pairs, in order: [pairs, H]; updates need groups."""
    first, second = _biases(experts)
    follows, top_k = _activation_of(experts), rows.pairs // len(x)
    hidden, inner = experts.down.out_features, experts.down.in_features
    if updates is None:
        # By expert, so that down's rows lie together.
        features = x.new_empty(rows.pairs, inner)
        _product(x, experts.gate_up, first, rows, features, top_k, follows)
    else:
        assert isinstance(rows, RowGroups)
        sums = x.new_empty(rows.pairs, experts.gate_up.out_features)
        put_off = Activation("none" if sums.shape[1] == inner else "put_off")
        _product(x, experts.gate_up, first, rows, sums, top_k, put_off)
        updates[0](x, sums, rows, top_k)
        features = follows.of(sums)
    outputs = x.new_empty((rows.pairs, hidden), dtype=dtype)
    _product(features, experts.down, second, rows, outputs, 0, Activation("none"))
    if updates is not None:
        assert isinstance(rows, RowGroups)
        updates[1](features, outputs, rows, 0)
    return outputs


def _biases(experts: StackedExperts) -> tuple[Tensor | None, Tensor | None]:
    form = experts.form
    return (form.gate_up, form.down) if isinstance(form, ClampedExperts) else (None, None)


def _activation_of(experts: StackedExperts) -> Activation:
    form = experts.form
    if isinstance(form, ClampedExperts):
        return Activation("clamped_swiglu", form.alpha, form.limit)
    if form is not None:
        return Activation("gelu_mul")
    is_gated = experts.gate_up.out_features != experts.down.in_features
    return Activation("silu_mul" if is_gated else "relu_squared")


def _product(
    x: Tensor,
    stack: ExpertStack | Int4Panels,
    biases: Tensor | None,
    rows: RowGroups | LonePairs,
    out: Tensor,
    gather: int,
    activation: Activation,
    tile: ExpertTile | None = None,
) -> None:
    """Multiply each pair's row by its expert's weight into ``out`` [pairs, N].

    Args:
        x: [rows, K] of ``gather`` pairs each; with ``gather`` 0 [pairs, K] by group.
        stack: the weights.
        biases: as for ``_expert_kernel``.
        rows: of all pairs.
        out: written, by group; in the order of pairs with ``gather`` 0. [pairs, 2 * N] if the
            activation is put off.
        gather: the pairs of a row of x, or 0.
        activation: what follows.
        tile: by default that of ``moe_tiles``.
    """
    out_features = out.shape[1] // (2 if activation.name == "put_off" else 1)
    in_features, is_gated = stack.in_features, stack.out_features > out_features
    hopper = supports_pdl(x) and has_hoppers_memory(x)
    panels = stack if isinstance(stack, Int4Panels) else None
    x_scales = x_tiles = w_tiles = None
    if isinstance(stack, Int4Panels):
        matrix, num_groups = stack.words, stack.scales.shape[1]
        tile = tile or panels_tile(rows.mean_rows, is_gated, hopper)
    else:
        matrix = stack.weight
        num_groups = 1 if stack.scales is None else groups_of(stack.scales[0])
        if stack.rounding is not None:
            x, x_scales = rounded(x, stack.rounding)
        whole = x_scales is not None and num_groups == groups_of(x_scales) == 1
        tile = tile or expert_tile(
            rows.mean_rows, out_features, in_features, matrix.itemsize, is_gated, hopper, whole
        )
        if tile.tma:
            w_box, x_box = [tile.features, tile.depth], [tile.rows, tile.depth]
            w_tiles = TensorDescriptor.from_tensor(matrix.flatten(0, 1), w_box)
            x_tiles = None if gather else TensorDescriptor.from_tensor(x, x_box)
    shares = tile.shares(rows.mean_rows)
    _expert_kernel[triton.cdiv(out_features, tile.features), shares, rows.most_chosen](
        x,
        x_tiles,
        matrix,
        w_tiles,
        stack.scales if panels is None else panels.kernel_scales,
        None if panels is None else panels.factors,
        None if panels is None else panels.offsets,
        x_scales,
        biases,
        *rows.tensors,
        out,
        out.shape[0],
        ONE,
        N=out_features,
        K=in_features,
        GATHER=gather,
        ACTIVATION=activation.name,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        W_GROUPS=num_groups,
        X_GROUPS=groups_of(x_scales),
        WORDS=0 if panels is None else matrix.shape[2],
        WIDTH=0 if panels is None else panels.width,
        E2M1=0 if panels is None else panels.e2m1_kind,
        FUSED=panels is not None and panels.fused,
        BLOCK_ROWS=tile.rows,
        BLOCK_FEATURES=tile.features,
        BLOCK_DEPTH=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_options(x),
    )


def _matrix(stack: ExpertStack | Int4Panels) -> Tensor:
    return stack.words if isinstance(stack, Int4Panels) else stack.weight

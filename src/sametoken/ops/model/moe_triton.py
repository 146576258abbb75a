"""The weighted sum of a row's experts in Triton; no shape depends on the routing.

Rows are grouped by expert on the device (``moe_rows_triton``), then multiplied
(``moe_kernel_triton``). Neighbouring programs share rows, then weights, so that both are read from
memory once. A row's bits depend neither on the tiles (``moe_tiles``), nor on the other rows of its
experts, nor on where elements of 4 bits are made: in registers, or for many rows in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sametoken.ops.model.activation_triton import Activation
from sametoken.ops.model.gemm.fp8_triton import rounded
from sametoken.ops.model.gemm.int4_panels import ONE, Int4Panels
from sametoken.ops.model.gemm.triton import groups_of
from sametoken.ops.model.moe_kernel_triton import expert_kernel
from sametoken.ops.model.moe_rows_triton import AddToPairs, RowGroups, combine
from sametoken.ops.model.moe_tiles import (
    EXPANDED_ROWS,
    ExpertTile,
    expert_tile,
    experts_at_once,
    panels_tile,
)
from sametoken.ops.pdl import pdl_options, supports_pdl
from sametoken.ops.weight import ClampedExperts, ExpertForm, Rounding


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """All experts' matrices of one product: [E, N, K], gate before up where both are.

    Attributes:
        weight: of the model's dtype or float8 e4m3.
        scales: of float8, fp32: [E, N], or [E, N, groups] by row and 128 features.
        rounding: of activations before a float8 product; None: none.
    """

    weight: Tensor
    scales: Tensor | None = None
    rounding: Rounding | None = None

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[1]

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of matrices and scales."""
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)


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
    num_rows, top_k = chosen.shape
    matrices = _matrix(experts.gate_up), _matrix(experts.down)
    hidden, inner = experts.down.out_features, experts.down.in_features
    assert all(tensor.is_contiguous() for tensor in (x, *matrices, chosen, weights))
    assert x.shape == (num_rows, hidden)
    out = torch.empty_like(x, dtype=dtype)
    if not num_rows:
        return out
    groups = RowGroups.of(chosen, experts.num_experts)
    first, second = _biases(experts)
    pairs, follows = num_rows * top_k, _activation_of(experts)
    if updates is None:
        features = x.new_empty(pairs, inner)  # by expert, so that down's rows lie together
        _product(x, experts.gate_up, first, groups, features, top_k, follows)
    else:
        sums = x.new_empty(pairs, experts.gate_up.out_features)
        put_off = Activation("none" if sums.shape[1] == inner else "put_off")
        _product(x, experts.gate_up, first, groups, sums, top_k, put_off)
        updates[0](x, sums, groups, top_k)
        features = follows.of(sums)
    outputs = out.new_empty(pairs, hidden)
    _product(features, experts.down, second, groups, outputs, 0, Activation("none"))
    if updates is not None:
        updates[1](features, outputs, groups, 0)
    combine(outputs, weights, out, beside)
    return out


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
    groups: RowGroups,
    out: Tensor,
    gather: int,
    activation: Activation,
) -> None:
    """Multiply each pair's row by its expert's weight into ``out`` [pairs, N].

    Args:
        x: [rows, K] of ``gather`` pairs each; [pairs, K] by expert with ``gather`` 0.
        stack: the weights. Of 4 bits they are expanded for many rows, some experts at a time.
        biases: as for ``expert_kernel``.
        groups: of all pairs.
        out: written, by expert; in the order of pairs with ``gather`` 0. [pairs, 2 * N] if the
            activation is put off.
        gather: the pairs of a row of x, or 0.
        activation: what follows.
    """
    if isinstance(stack, ExpertStack) or groups.mean_rows <= EXPANDED_ROWS:
        multiply(x, stack, biases, groups, out, gather, activation)
        return
    n, k = stack.out_features, stack.in_features
    memory = x.new_empty(experts_at_once(len(stack.words), n * k), n, k)
    for part in groups.parts(len(memory)):
        stack.expand_experts(part.experts, part.counts, memory)
        multiply(x, ExpertStack(memory), biases, part, out, gather, activation, placed=True)


def multiply(
    x: Tensor,
    stack: ExpertStack | Int4Panels,
    biases: Tensor | None,
    groups: RowGroups,
    out: Tensor,
    gather: int,
    activation: Activation,
    *,
    placed: bool = False,
    tile: ExpertTile | None = None,
) -> None:
    """``_product`` by one kernel.

    Args:
        placed: matrices lie in the order of the groups' experts; else by id.
        tile: by default ``expert_tile``; others are in ``_product``.
    """
    out_features = out.shape[1] // (2 if activation.name == "put_off" else 1)
    in_features = stack.in_features
    is_gated, hopper = stack.out_features > out_features, supports_pdl(x)
    panels = stack if isinstance(stack, Int4Panels) else None
    x_scales = x_tiles = w_tiles = None
    if isinstance(stack, Int4Panels):
        matrix, num_groups = stack.words, stack.scales.shape[1]
        tile = panels_tile(groups.mean_rows, is_gated)
    else:
        matrix = stack.weight
        num_groups = 1 if stack.scales is None else groups_of(stack.scales[0])
        if stack.rounding is not None:
            x, x_scales = rounded(x, stack.rounding)
        whole = x_scales is not None and num_groups == groups_of(x_scales) == 1
        tile = tile or expert_tile(
            groups.mean_rows, out_features, in_features, matrix.itemsize, is_gated, hopper, whole
        )
        if tile.tma:
            w_box, x_box = [tile.features, tile.depth], [tile.rows, tile.depth]
            w_tiles = TensorDescriptor.from_tensor(matrix.flatten(0, 1), w_box)
            x_tiles = None if gather else TensorDescriptor.from_tensor(x, x_box)
    shares = tile.shares(groups.mean_rows)
    expert_kernel[triton.cdiv(out_features, tile.features), shares, groups.most_chosen](
        x,
        x_tiles,
        matrix,
        w_tiles,
        stack.scales,
        None if panels is None else panels.factors,
        None if panels is None else panels.offsets,
        x_scales,
        biases,
        groups.experts,
        groups.counts,
        groups.starts,
        groups.members,
        out,
        out.shape[0],
        ONE,
        N=out_features,
        K=in_features,
        PLACED=placed,
        GATHER=gather,
        ACTIVATION=activation.name,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        W_GROUPS=num_groups,
        X_GROUPS=groups_of(x_scales),
        WORDS=0 if panels is None else matrix.shape[2],
        WIDTH=0 if panels is None else panels.width,
        E2M1=panels is not None and panels.e2m1,
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

"""The experts of many rows on Hopper, of 4-bit weights, by ``moe_panels_hopper_kernels``.

On other chips, of few rows and of other forms, the kernel of ``moe_triton`` serves, with the same
bits.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.hopper import MULTIPROCESSORS, is_hopper
from sametoken.ops.hopper_layouts import boxes
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.activation_triton import Activation
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.moe_panels_hopper_kernels import BLOCK, BOX, ROWS, WORDS, panels_kernel
from sametoken.ops.model.moe_rows_triton import RowGroups, RowTiles
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

#: Rows of an expert, in the mean, above which they are faster than Triton's.
_FEW_ROWS = 48

#: Slots of tiles in shared memory.
_SLOTS = 4

#: Registers of a thread, on average over warps.
_REGISTERS = 168

#: Rows that a program copies, and elements of each at most.
_ROWS, _COLUMNS = 16, 256


def outputs(
    x: Tensor,
    gate_up: ExpertStack | Int4Panels,
    down: ExpertStack | Int4Panels,
    biases: tuple[Tensor | None, Tensor | None],
    groups: RowGroups,
    dtype: torch.dtype,
    activation: Activation,
) -> Tensor | None:
    """Outputs of experts with gates of all pairs of a row and a choice: [pairs, H].

    None where other kernels serve.

    Args:
        x: [T, H], contiguous.
        gate_up: [E, 2 * I, H].
        down: [E, H, I].
        biases: of both, [E, 2 * I] and [E, H].
        groups: of all pairs.
        dtype: of the result; gate and up are rounded to x's.
        activation: that follows gate and up.
    """
    if not (
        isinstance(gate_up, Int4Panels)
        and isinstance(down, Int4Panels)
        and groups.mean_rows > _FEW_ROWS
        and gate_up.out_features == 2 * down.in_features
        and is_hopper(x.device)
        and _serves(gate_up, x.dtype)
        and _serves(down, x.dtype)
    ):
        return None
    tiles = RowTiles.of(groups, ROWS.value)
    features = x.new_empty(groups.pairs, down.in_features)
    rows = _by_expert(x, tiles.order, groups.pairs // len(x))
    product(rows, gate_up, biases[0], features, tiles, activation, in_order=False)
    out = x.new_empty((groups.pairs, down.out_features), dtype=dtype)
    product(features, down, biases[1], out, tiles, Activation("none"), in_order=True)
    return out


def _serves(panels: Int4Panels, dtype: torch.dtype) -> bool:
    """Whether these kernels read them; TMA needs rows of multiples of 16 bytes."""
    return panels.made_by(dtype) is not None and panels.in_features % 8 == 0


def _by_expert(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """The rows of all pairs by expert: [pairs, K]."""
    (pairs, width), columns = (len(order), x.shape[1]), min(_COLUMNS, next_power_of_2(x.shape[1]))
    out = x.new_empty(pairs, width)
    _gather_kernel[(cdiv(pairs, _ROWS), cdiv(width, columns))](
        x,
        order,
        out,
        pairs,
        WIDTH=width,
        TOP_K=top_k,
        ROWS=_ROWS,
        COLUMNS=columns,
        num_warps=4,
        **pdl_options(x),
    )
    return out


def product(
    x: Tensor,
    panels: Int4Panels,
    biases: Tensor | None,
    out: Tensor,
    tiles: RowTiles,
    activation: Activation,
    *,
    in_order: bool,
) -> None:
    """Multiply rows by their experts' weights, and apply the activation.

    Args:
        x: [rows, K] by expert.
        panels: of [E, N, K], gate first of a gated product.
        biases: [E, N], or None.
        out: [rows, N], of a gated product [rows, N / 2], written.
        tiles: of ROWS rows.
        activation: that follows a gated product, or "none".
        in_order: results lie in the order of pairs, not by expert.
    """
    assert x.is_contiguous()
    assert out.is_contiguous()
    scales, form = panels.kernel_scales, panels.made_by(x.dtype)
    assert form is not None
    panels_kernel[(MULTIPROCESSORS,)](
        boxes(x, ROWS.value),
        boxes(panels.words.flatten(0, 1), BOX.value, WORDS.value * 4),
        scales,
        panels.offsets,
        panels.factors,
        biases,
        out,
        panels.words.shape[2] // WORDS.value,
        out.shape[1],
        scales.shape[1],
        tiles.count,
        tiles.experts,
        tiles.firsts,
        tiles.ends,
        tiles.order if in_order else None,
        ACTIVATION=activation.name,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        IN_BLOCK=BLOCK.value // panels.width,
        FORM=form,
        SLOTS=_SLOTS,
        num_warps=4,
        maxnreg=_REGISTERS,
        **pdl_options(x),
    )


@triton.jit(do_not_specialize=["pairs"])
def _gather_kernel(
    x,  # [rows, WIDTH]
    order,  # [pairs], each of a row of x and one of TOP_K choices
    out,  # [pairs, WIDTH], written
    pairs,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.load(order + line, line < pairs, other=0) // TOP_K).to(tl.int64)
    inside = (line < pairs)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(x + row[:, None] * WIDTH + column[None, :], inside, other=0.0)
    tl.store(out + line[:, None] * WIDTH + column[None, :], value, inside)

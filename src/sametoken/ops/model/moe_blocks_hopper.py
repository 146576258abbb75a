"""The experts of many rows on Hopper, of float8 weights with scales of blocks.

On other chips, of few rows and of other weights, the kernel of ``moe_triton`` serves, with the same
bits.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from sametoken.ops.hopper import is_hopper
from sametoken.ops.model.gemm.blocks_hopper import TILE_ROWS, expert_product, serves
from sametoken.ops.model.gemm.fp8_triton import rounded
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.triton import Scaling
from sametoken.ops.model.gemm.tuning import Epilogue, GemmShape
from sametoken.ops.model.moe_rows_triton import RowGroups, RowTiles
from sametoken.ops.model.moe_stack import ExpertStack


def outputs(
    x: Tensor,
    gate_up: ExpertStack | Int4Panels,
    down: ExpertStack | Int4Panels,
    groups: RowGroups,
    dtype: torch.dtype,
) -> Tensor | None:
    """Outputs of experts with gates and SiLU of all pairs of a row and a choice: [pairs, H].

    None where other kernels serve.

    Args:
        x: [T, H], contiguous.
        gate_up: [E, 2 * I, H].
        down: [E, H, I].
        groups: of all pairs.
        dtype: of the result; gate and up are rounded to x's.
    """
    if not (
        is_hopper(x.device)
        and _serves(gate_up, "silu_mul", groups.mean_rows)
        and _serves(down, "none", groups.mean_rows)
        and gate_up.out_features == 2 * down.in_features
    ):
        return None
    pairs = groups.pairs
    tiles = RowTiles.of(groups, TILE_ROWS)
    values, scaling = _rounded(x, gate_up, x.dtype, tiles.order, pairs // len(x))
    features = x.new_empty(pairs, down.in_features)
    expert_product(values, gate_up.weight, scaling, features, tiles, in_order=False)
    values, scaling = _rounded(features, down, dtype)
    out = x.new_empty((pairs, down.out_features), dtype=dtype)
    expert_product(values, down.weight, scaling, out, tiles, in_order=True)
    return out


def _serves(
    stack: ExpertStack | Int4Panels, epilogue: Epilogue, mean_rows: float
) -> TypeGuard[ExpertStack]:
    if not isinstance(stack, ExpertStack) or not stack.blocks or stack.rounding is None:
        return False
    shape = GemmShape(stack.out_features, stack.in_features, epilogue)
    return stack.rounding.grouped and serves(shape, int(mean_rows))


def _rounded(
    x: Tensor, stack: ExpertStack, dtype: torch.dtype, pairs: Tensor | None = None, top_k: int = 1
) -> tuple[Tensor, Scaling]:
    """Rows as ``rounded`` gives them, and the scales of a product."""
    assert stack.rounding is not None
    assert stack.scales is not None
    values, scales = rounded(x, stack.rounding, pairs, top_k)
    return values, Scaling(stack.scales, scales, dtype)

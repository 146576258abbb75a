"""Embedding lookup in Triton, alone or concatenated with hidden states."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import Norm
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.norm_triton import aligned, row_program, store_normed
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_BLOCK = 1024


@triton.jit
def _embedding_kernel(
    token_ids,  # [T]
    matrix,  # [V, WIDTH]
    out,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    token_id = tl.load(token_ids + row)
    value = tl.load(matrix + token_id * WIDTH + columns, inside)
    tl.store(out + row * WIDTH + columns, value, inside)


def embedding(token_ids: Tensor, matrix: Tensor) -> Tensor:
    """Rows of the matrix: [T] int64 ids of [V, K] -> [T, K]."""
    assert matrix.is_contiguous()
    assert token_ids.is_contiguous()
    num_rows, width = token_ids.shape[0], matrix.shape[1]
    out = matrix.new_empty(num_rows, width)
    if num_rows:
        grid = (num_rows, cdiv(width, _BLOCK))
        _embedding_kernel[grid](
            token_ids, matrix, out, WIDTH=width, BLOCK=_BLOCK, num_warps=4, **pdl_options(matrix)
        )
    return out


@triton.jit
def _embed_beside_kernel(
    token_ids,  # [T]
    matrix,  # [V, WIDTH]
    hidden,  # [T, WIDTH]
    embedding_weight,  # [WIDTH]
    hidden_weight,  # [WIDTH]
    out,  # [T, 2 * WIDTH]
    embedding_eps,
    hidden_eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out += row * (2 * WIDTH)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if tl.program_id(1) == 0:
        factor = tl.load(embedding_weight + columns, inside, other=0.0).to(tl.float32)
        gdc_launch_and_wait(PDL)
        start = tl.load(token_ids + row) * WIDTH
        value = tl.load(matrix + start + columns, inside, other=0.0).to(tl.float32)
        store_normed(out, value, factor, embedding_eps, WIDTH, BLOCK)
    else:
        factor = tl.load(hidden_weight + columns, inside, other=0.0).to(tl.float32)
        gdc_launch_and_wait(PDL)
        value = tl.load(hidden + row * WIDTH + columns, inside, other=0.0).to(tl.float32)
        store_normed(out + WIDTH, value, factor, hidden_eps, WIDTH, BLOCK)


def embed_beside(
    token_ids: Tensor, matrix: Tensor, embedding_norm: Norm, hidden: Tensor, hidden_norm: Norm
) -> Tensor:
    """See ``Kernels.embed_beside``; ``matrix`` is [V, H] in the dtype of ``hidden``."""
    num_rows, width = hidden.shape
    weights = (embedding_norm.weight, hidden_norm.weight)
    assert token_ids.shape == (num_rows,)
    assert matrix.shape[1] == width
    assert matrix.dtype == hidden.dtype
    assert all(weight.shape == (width,) for weight in weights)
    assert all(one.is_contiguous() for one in (token_ids, matrix, hidden, *weights))
    assert aligned(matrix, hidden, *weights)
    out = hidden.new_empty(num_rows, 2 * width)
    if num_rows:
        _embed_beside_kernel[(num_rows, 2)](
            token_ids,
            matrix,
            hidden,
            *weights,
            out,
            embedding_norm.eps,
            hidden_norm.eps,
            **row_program(width),
            **pdl_options(hidden),
        )
    return out

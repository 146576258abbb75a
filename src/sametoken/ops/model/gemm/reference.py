"""Matrix products in plain PyTorch, in calls of one fixed shape.

A library may choose the order of additions by the number of rows and by the number of threads, in
fp32 also by a row's place where the matrix has few rows itself. So it is only called on one thread
and with ``ROWS`` rows, zero padded, and in fp32 with matrices of at least ``NARROW`` rows, padded
too (tests/unit/ops/test_batch_invariance.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.ops.model.one_thread import one_thread

ROWS = 8
FEATURES = 4096
NARROW = 16


@dataclass(frozen=True, slots=True)
class MatrixWeight:
    """A weight as one contiguous tensor [N, K]."""

    matrix: Tensor

    @property
    def out_features(self) -> int:
        """N."""
        return self.matrix.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.matrix.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the one copy."""
        return self.matrix.nbytes


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ matrix.T (+ bias)``: [T, K] and [N, K] -> [T, N] in x's dtype."""
    out = x.new_empty(x.shape[0], matrix.shape[0])
    for first, tile in _tiles(x):
        last = first + ROWS
        out[first:last] = _linear(tile, matrix, bias)[: x.shape[0] - first]
    return out


def product_fp32(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix.T`` in fp32, without rounding to x's dtype: [T, K] and [N, K] -> [T, N]."""
    out = x.new_empty(x.shape[0], matrix.shape[0], dtype=torch.float32)
    tiles = list(_tiles(x.float()))
    for start in range(0, matrix.shape[0], FEATURES):
        block = matrix[start : start + FEATURES].float()
        columns = slice(start, start + block.shape[0])
        for first, tile in tiles:
            last = first + ROWS
            out[first:last, columns] = _linear(tile, block)[: x.shape[0] - first]
    return out


def _linear(tile: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """``tile @ matrix.T (+ bias)``: [ROWS, K] and [N, K] -> [ROWS, N]."""
    width = matrix.shape[0]
    with one_thread():
        if tile.dtype != torch.float32:
            return F.linear(tile, matrix, bias)
        if width < NARROW:
            matrix = F.pad(matrix, (0, 0, 0, NARROW - width))
        out = F.linear(tile, matrix)[:, :width]
    return out if bias is None else out + bias


def _tiles(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """First row and a fresh [ROWS, K] copy of each tile of [T, K], the last zero padded."""
    for first in range(0, x.shape[0], ROWS):
        tile = x.new_zeros(ROWS, x.shape[1])
        rows = x[first : first + ROWS]
        tile[: rows.shape[0]] = rows
        yield first, tile

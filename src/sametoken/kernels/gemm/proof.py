"""GEMM choices that this chip has been seen to keep the row law with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.kernels.gemm.selfcheck import GemmReport, check_gemm
from sametoken.kernels.gemm.tuning import (
    CublasConfig,
    GemmConfig,
    GemmShape,
    TuningTable,
    default_config,
)


@dataclass(slots=True)
class ProvenTable:
    """A tuning table that hands out the vendor's library at proven row counts alone.

    Triton's kernels add in order at every row count by construction; the library picks a
    kernel per row count, so each count is compared before it is used.

    Attributes:
        table: the choices; those that a proof refused have been replaced.
    """

    table: TuningTable
    _proven: dict[GemmShape, frozenset[int]] = field(default_factory=dict)

    def choose(self, shape: GemmShape, rows: int) -> GemmConfig:
        """The kernel for ``rows`` rows of activations."""
        config = self.table.choose(shape, rows)
        if isinstance(config, CublasConfig) and rows not in self._proven.get(shape, ()):
            return default_config(shape, rows)
        return config

    def prove(
        self, matrices: Iterable[Tensor], row_counts: tuple[int, ...]
    ) -> tuple[GemmReport, ...]:
        """Compare every listed choice for these weights at these row counts.

        Args:
            matrices: one weight [N, K] per shape, on the device.
            row_counts: row counts to prove, each at least 1.
        """
        reports = []
        for matrix in matrices:
            if matrix.dtype == torch.float32:
                continue
            for shape in self.table.entries:
                if (shape.out_features, shape.in_features) == tuple(matrix.shape):
                    self.table, report = check_gemm(matrix, shape.epilogue, self.table, row_counts)
                    self._proven[shape] = self._proven.get(shape, frozenset()) | set(row_counts)
                    reports.append(report)
        return tuple(reports)

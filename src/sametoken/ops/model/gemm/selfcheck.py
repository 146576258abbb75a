"""Start-up self-check: every GEMM kernel chosen for a weight gives the same bits on this chip."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.ops.model.gemm.triton import product
from sametoken.ops.model.gemm.tuning import (
    CANONICAL,
    CublasConfig,
    Epilogue,
    GemmConfig,
    GemmShape,
    TuningTable,
    default_config,
    row_bucket,
)


@dataclass(slots=True)
class ProvenTable:
    """A tuning table that chooses cuBLAS only at row counts that passed the self-check.

    Triton kernels add in order at every row count by construction; cuBLAS picks a kernel per row
    count, so each count is compared before use.

    Attributes:
        table: the choices; refused ones have been replaced.
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
        """Check every listed choice for these weights at these row counts.

        Args:
            matrices: one weight [N, K] per shape, on the device.
            row_counts: row counts to check, each at least 1.
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """A chosen kernel whose bits differed, and the row bucket that it no longer serves."""

    bucket: int
    config: GemmConfig


@dataclass(frozen=True, slots=True)
class GemmReport:
    """Result of the self-check for one weight shape.

    Attributes:
        shape: the weight and its epilogue.
        num_row_counts: number of row counts at which bits were compared.
        refused: choices that were replaced.
    """

    shape: GemmShape
    num_row_counts: int
    refused: tuple[Refusal, ...]


def check_gemm(
    weight: Tensor, epilogue: Epilogue, table: TuningTable, row_counts: Iterable[int]
) -> tuple[TuningTable, GemmReport]:
    """Compare the chosen kernels with the canonical one on random rows.

    cuBLAS may pick another kernel at any row count, so pass every count that will be served. A
    choice that differs is replaced by the default kernel, or by the canonical one if that differs
    too.

    Args:
        weight: [N, K] on the device, bf16 or fp16.
        epilogue: of the products of this weight.
        table: the choices to check.
        row_counts: row counts that will be served, each at least 1.

    Returns:
        A table whose choices for this shape all passed, and the report.
    """
    shape = GemmShape(weight.shape[0], weight.shape[1], epilogue)
    buckets: dict[int, list[int]] = {}
    for rows in sorted(set(row_counts)):
        buckets.setdefault(row_bucket(rows), []).append(rows)
    largest = max(counts[-1] for counts in buckets.values())
    x, bias = _random_inputs(weight, epilogue, largest)
    expected = _by_canonical(x, weight, epilogue, bias)

    refused: list[Refusal] = []
    for bucket, counts in buckets.items():
        for config in (table.choose(shape, counts[-1]), default_config(shape, bucket)):
            if _agrees(config, counts, (x, weight, epilogue, bias), expected):
                break
            refused.append(Refusal(bucket, config))
        else:
            config = CANONICAL
        table = table.replaced(shape, bucket, config)
    return table, GemmReport(shape, sum(map(len, buckets.values())), tuple(refused))


def _random_inputs(weight: Tensor, epilogue: Epilogue, rows: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator(weight.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, device=weight.device, generator=generator)
        return values.to(weight.dtype)

    x = normal(rows, weight.shape[1])
    return x, normal(weight.shape[0]) if epilogue == "bias" else None


def _by_canonical(x: Tensor, weight: Tensor, epilogue: Epilogue, bias: Tensor | None) -> Tensor:
    """All rows by the canonical kernel, one tile per call, so that no other row count is used."""
    step = CANONICAL.block_rows
    parts = [
        product(CANONICAL, x[at : at + step], weight, epilogue, bias)
        for at in range(0, x.shape[0], step)
    ]
    return torch.cat(parts)


def _agrees(
    config: GemmConfig,
    counts: list[int],
    inputs: tuple[Tensor, Tensor, Epilogue, Tensor | None],
    expected: Tensor,
) -> bool:
    x, weight, epilogue, bias = inputs
    differs = torch.zeros((), dtype=torch.bool, device=x.device)
    for rows in counts:
        out = product(config, x[:rows], weight, epilogue, bias)
        differs |= (out != expected[:rows]).any()
    return not bool(differs)

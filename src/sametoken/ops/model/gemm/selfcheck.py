"""Start-up self-check: every GEMM kernel chosen for a weight gives the same bits on this chip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.ops.model.gemm.product import product
from sametoken.ops.model.gemm.tuning import (
    CANONICAL,
    CublasConfig,
    Epilogue,
    GemmConfig,
    GemmShape,
    GemmTable,
    row_bucket,
)

#: Elements of the largest result that is compared, 2 GiB in fp32, of which two are in memory.
MOST_COMPARED = 1 << 29


@dataclass(slots=True)
class ProvenTable:
    """A tuning table that chooses cuBLAS only at row counts that passed the self-check.

    Other kernels add in order at every row count by construction; cuBLAS picks one per row count,
    so each count is compared before use.

    Attributes:
        table: the choices; refused ones have been replaced.
    """

    table: GemmTable
    _proven: dict[GemmShape, frozenset[int]] = field(default_factory=dict)
    _asked: set[GemmShape] = field(default_factory=set)

    def choose(self, shape: GemmShape, rows: int) -> GemmConfig:
        """The kernel for ``rows`` rows of activations."""
        self._asked.add(shape)
        config = self.table.choose(shape, rows)
        if isinstance(config, CublasConfig) and rows not in self._proven.get(shape, ()):
            return self.table.in_order(shape, rows)
        return config

    def prove(
        self, matrices: Iterable[Tensor], row_counts: tuple[int, ...]
    ) -> tuple[GemmReport, ...]:
        """Check the choices for these weights at these row counts, where ever asked for.

        Args:
            matrices: one weight [N, K] per shape, on the device.
            row_counts: row counts to check, each at least 1.
        """
        reports = []
        for matrix, shape, counts in self._compared(matrices, row_counts):
            self.table, report = check_gemm(matrix, shape.epilogue, self.table, counts)
            agreed = set(counts).difference(*(one.row_counts for one in report.refused))
            self._proven[shape] = self._proven.get(shape, frozenset()) | agreed
            reports.append(report)
        return tuple(reports)

    def run_candidates(self, matrices: Iterable[Tensor], row_counts: tuple[int, ...]) -> None:
        """Run each kernel that ``prove`` would compare once; arguments are as there."""
        for matrix, shape, counts in self._compared(matrices, row_counts):
            x, bias = _random_inputs(matrix, shape.epilogue, 1)
            for config in {CANONICAL, *(self.table.choose(shape, rows) for rows in counts)}:
                product(config, x, matrix, shape.epilogue, bias)

    def _compared(
        self, matrices: Iterable[Tensor], row_counts: tuple[int, ...]
    ) -> Iterator[tuple[Tensor, GemmShape, tuple[int, ...]]]:
        for matrix in matrices:
            if matrix.dtype == torch.float32:
                continue
            for shape in sorted(self._asked, key=str):
                if (shape.out_features, shape.in_features) == tuple(matrix.shape):
                    yield matrix, shape, compared_counts(row_counts, shape.out_features)


def compared_counts(row_counts: Iterable[int], out_features: int) -> tuple[int, ...]:
    """The row counts at which a product is compared: all but the largest of a vocabulary's head.

    A step computes logits of few of its rows. Where it does of more, the kernels that add in order
    by construction serve.
    """
    return tuple(rows for rows in row_counts if rows * out_features <= MOST_COMPARED)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A chosen kernel, and the row counts that it no longer serves as its bits differed."""

    config: GemmConfig
    row_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GemmReport:
    """Result of the self-check for one weight shape.

    Attributes:
        shape: the weight and its epilogue.
        refused: choices that were replaced.
    """

    shape: GemmShape
    refused: tuple[Refusal, ...]


def check_gemm(
    weight: Tensor, epilogue: Epilogue, table: GemmTable, row_counts: Iterable[int]
) -> tuple[GemmTable, GemmReport]:
    """Compare the chosen kernels with the canonical one on random rows.

    cuBLAS may pick another kernel at any row count, so pass every count that will be served. It
    is refused at the counts where it differs, another kernel wholly. The default of
    ``in_order_config`` takes their place, or the canonical one if that differs too.

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
        config, inputs = table.choose(shape, counts[-1]), (x, weight, epilogue, bias)
        if differing := _differing(config, counts, inputs, expected):
            refused.append(Refusal(config, differing))
            keeps_others = isinstance(config, CublasConfig) and len(differing) < len(counts)
            default = table.in_order(shape, bucket)
            served = differing if keeps_others else counts
            if also := _differing(default, served, inputs, expected):
                refused.append(Refusal(default, also))
                config = CANONICAL
            elif not keeps_others:
                config = default
        table = table.replaced(shape, bucket, config)
    return table, GemmReport(shape, tuple(refused))


def require_row_law(what: str, run: Callable[[slice], Tensor], row_counts: Iterable[int]) -> None:
    """Refuse products that give a row other bits among other numbers of rows on this chip.

    For weights and experts that own their kernels, which a table does not choose. The largest row
    count of each bucket is compared: kernels are chosen by size, and none by the exact count.

    Args:
        what: the products, for the message.
        run: a range of rows to their results, [rows, ...].
        row_counts: row counts that will be served, each at least 1.

    Raises:
        UnsupportedError: bits differ.
    """
    counts = sorted({row_bucket(rows): rows for rows in sorted(row_counts)}.values())
    step = CANONICAL.block_rows
    parts = [run(slice(at, at + step)) for at in range(0, counts[-1], step)]
    expected = torch.cat(parts)
    differing = [rows for rows in counts if not torch.equal(run(slice(rows)), expected[:rows])]
    if differing:
        raise UnsupportedError(
            f"{what} give a row other bits among {differing} rows than among {step} on this GPU",
            "use device 'cpu' or another checkpoint, and report the GPU",
        )


def normal(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normally distributed numbers on the generator's device, made in fp32."""
    device = generator.device
    return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def _random_inputs(weight: Tensor, epilogue: Epilogue, rows: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator(weight.device).manual_seed(0)
    x = normal(generator, (rows, weight.shape[1]), weight.dtype)
    has_bias = epilogue == "bias"
    return x, normal(generator, (weight.shape[0],), weight.dtype) if has_bias else None


def _by_canonical(x: Tensor, weight: Tensor, epilogue: Epilogue, bias: Tensor | None) -> Tensor:
    """All rows by the canonical kernel, one tile per call, so that no other row count is used."""
    step = CANONICAL.block_rows
    parts = [
        product(CANONICAL, x[at : at + step], weight, epilogue, bias)
        for at in range(0, x.shape[0], step)
    ]
    return torch.cat(parts)


def _differing(
    config: GemmConfig,
    counts: Sequence[int],
    inputs: tuple[Tensor, Tensor, Epilogue, Tensor | None],
    expected: Tensor,
) -> tuple[int, ...]:
    """The row counts at which a kernel's bits are not the expected ones."""
    x, weight, epilogue, bias = inputs
    differs = []
    # From the largest down: torch then uses the memory of one result for all.
    for rows in reversed(counts):
        out = product(config, x[:rows], weight, epilogue, bias)
        differs.append((out != expected[:rows]).any())
    found = reversed(torch.stack(differs).tolist())
    return tuple(rows for rows, differs in zip(counts, found, strict=True) if differs)

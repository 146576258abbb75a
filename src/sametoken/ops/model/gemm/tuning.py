"""Which GEMM kernel serves a weight shape at a row count: measured tables and defaults.

Every choice gives the same bits (docs/lossless.md), so a table may only change speed;
``selfcheck`` proves that on the chip at hand. ``benchmarks/kernels/gemm_gpu.py`` writes the tables.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal, Protocol, get_args

from sametoken.errors import ConfigError

#: What happens to a product before it is stored; "logits" leaves it in fp32.
Epilogue = Literal["none", "bias", "silu_mul", "logits"]

#: When the kernel behind a product may start.
Release = Literal["early", "late", "never"]

#: A row count is served by the choice of the smallest bucket that holds it, or the last.
ROW_BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256, 384, 512, 2048)

#: Programs that a narrow weight should give, about one per multiprocessor.
MIN_PROGRAMS = 120


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A weight [out_features, in_features] as the checkpoint has it, and its epilogue."""

    out_features: int
    in_features: int
    epilogue: Epilogue = "none"


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Tiles and launch of the Triton kernel; none of it changes a bit of the result.

    Attributes:
        block_rows: activation rows per program.
        block_features: weight rows per program (of gate and of up each for ``silu_mul``).
        block_depth: elements of the sum per loop turn.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        tma: load tiles through tensor descriptors.
        tma_rows: with ``tma``, the activations' tiles too; otherwise those through pointers.
        pdl: start before the kernel in front ends (programmatic dependent launch,
            compute capability 9.0 and up).
        prefetch_bytes: with ``pdl``, how much of each weight row to ask into L2
            meanwhile: a multiple of 16 or 0; more than a row has means all of it.
        release: when the next kernel may start: "early", with ``pdl``, as early as this one;
            "late", when the sums are done; "never" before this one has ended.
        weights_first: with ``pdl``, fill the pipeline with weights meanwhile too; the
            activations then come through registers, so that many rows do not fit.
    """

    block_rows: int
    block_features: int
    block_depth: int
    num_warps: int
    num_stages: int
    tma: bool = False
    pdl: bool = False
    prefetch_bytes: int = 8192
    tma_rows: bool = True
    release: Release = "early"
    weights_first: bool = False


@dataclass(frozen=True, slots=True)
class CublasConfig:
    """The vendor's library, where it does not split the sum."""


GemmConfig = TritonConfig | CublasConfig

#: The kernel whose bits define the result; every other choice must equal it.
CANONICAL = TritonConfig(16, 32, 128, num_warps=4, num_stages=4)

#: fp32 products run on the plain ALUs: one small tile for all row counts.
FLOAT32 = TritonConfig(16, 32, 32, num_warps=4, num_stages=2)


class GemmChooser(Protocol):
    """Whatever says which kernel serves a shape."""

    def choose(self, shape: GemmShape, rows: int) -> GemmConfig:
        """The kernel for ``rows`` rows of activations."""
        ...


@dataclass(frozen=True, slots=True)
class TuningTable:
    """Choices by shape and row bucket; shapes that are not listed get ``default_config``."""

    entries: Mapping[GemmShape, Mapping[int, GemmConfig]] = field(default_factory=dict)

    def choose(self, shape: GemmShape, rows: int) -> GemmConfig:
        """The kernel for ``rows`` rows of activations."""
        measured = self.entries.get(shape, {})
        chosen = measured.get(row_bucket(rows))
        return chosen if chosen is not None else default_config(shape, rows)

    def replaced(self, shape: GemmShape, bucket: int, config: GemmConfig) -> TuningTable:
        """This table with another choice for one bucket of one shape."""
        choices = {**self.entries.get(shape, {}), bucket: config}
        return TuningTable({**self.entries, shape: choices})

    def to_json(self) -> str:
        """The table as a JSON text that ``from_json`` reads back."""
        rows = [
            dataclasses.asdict(shape)
            | {"choices": {str(bucket): _dumped(config) for bucket, config in choices.items()}}
            for shape, choices in self.entries.items()
        ]
        return json.dumps(rows, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str) -> TuningTable:
        """Read a table back.

        Args:
            text: what ``to_json`` gave.
            source: the file's name, for error messages.

        Raises:
            ConfigError: the text is not such a table.
        """
        try:
            return cls(dict(_entry(row) for row in json.loads(text)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"tuning table {source} is malformed: {error!r}",
                "write it anew with benchmarks/kernels/gemm_gpu.py",
            ) from error


def row_bucket(rows: int) -> int:
    """The bucket that serves a row count."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])


def default_config(shape: GemmShape, rows: int) -> TritonConfig:
    """A sensible in-order kernel for a shape that nobody has measured."""
    if rows > 64:
        warps = 8 if shape.epilogue == "silu_mul" else 4
        return TritonConfig(128, 64, 64, num_warps=warps, num_stages=3)
    programs = shape.out_features // (2 if shape.epilogue == "silu_mul" else 1)
    widths = (width for width in (64, 32) if programs // width >= MIN_PROGRAMS)
    width = next(widths, 16)
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    depth = 256 if width <= 32 and block_rows <= 32 else 128
    return TritonConfig(block_rows, width, depth, num_warps=4, num_stages=3)


def load_table(device_name: str, folder: Traversable | None = None) -> TuningTable:
    """The measured table of a device such as "NVIDIA H200"; an empty one if there is none.

    Raises:
        ConfigError: the table's file is malformed.
    """
    folder = folder or resources.files(__package__) / "tuned"
    file = folder / table_name(device_name)
    return TuningTable.from_json(file.read_text(), file.name) if file.is_file() else TuningTable()


def table_name(device_name: str) -> str:
    """File name of a device's table."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json"


def _dumped(config: GemmConfig) -> Any:
    return "cublas" if isinstance(config, CublasConfig) else dataclasses.asdict(config)


def _entry(row: dict[str, Any]) -> tuple[GemmShape, dict[int, GemmConfig]]:
    if row["epilogue"] not in get_args(Epilogue):
        raise ValueError(f"unknown epilogue {row['epilogue']!r}")
    shape = GemmShape(row["out_features"], row["in_features"], row["epilogue"])
    choices: dict[int, GemmConfig] = {}
    for bucket, config in row["choices"].items():
        if int(bucket) not in ROW_BUCKETS:
            raise ValueError(f"unknown row bucket {bucket}")
        choices[int(bucket)] = CublasConfig() if config == "cublas" else _triton_config(**config)
    return shape, choices


def _triton_config(**fields: Any) -> TritonConfig:
    config = TritonConfig(**fields)
    if config.release not in get_args(Release):
        raise ValueError(f"unknown release {config.release!r}")
    return config

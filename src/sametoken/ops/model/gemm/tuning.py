"""The GEMM kernel of each weight shape and row count: tuned tables and defaults.

Every choice gives the same bits (docs/lossless.md), so a table changes speed only; ``selfcheck``
verifies that on the chip in use. ``benchmarks/kernels/gemm_gpu.py`` writes the tables.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal, Protocol, get_args

from sametoken.errors import ConfigError

#: Operation on a product before its store; "logits" leaves it in fp32.
Epilogue = Literal["none", "bias", "silu_mul", "logits"]

#: When a product triggers the launch of the next kernel.
Release = Literal["early", "late", "never"]

#: A row count uses the choice of the smallest bucket that holds it, or of the last one.
ROW_BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256, 384, 512, 2048)

#: Least number of programs for a narrow weight, about one per multiprocessor.
MIN_PROGRAMS = 120

#: A weight with fewer features than the first leaves most of a Hopper's multiprocessors without a
#: program; with fewer than the second, each has one to itself.
NARROW, MIDDLE = 4608, 8448


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Shape of a weight in the checkpoint, [out_features, in_features], and its epilogue."""

    out_features: int
    in_features: int
    epilogue: Epilogue = "none"


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Tiles and launch options of the Triton kernel; none affects the bits of the result.

    Attributes:
        block_rows: activation rows per program.
        block_features: weight rows per program (of gate and of up each for ``silu_mul``).
        block_depth: elements of the sum per loop iteration.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        tma: load tiles through tensor descriptors (TMA).
        tma_rows: with ``tma``, load the activations' tiles by TMA too, not through pointers.
        pdl: start before the previous kernel ends (programmatic dependent launch, compute
            capability 9.0 and up).
        prefetch_bytes: with ``pdl``, bytes of each weight row to prefetch into L2 before the
            wait: a multiple of 16 or 0, capped at the row.
        release: when the next kernel may start: "early" (with ``pdl``) at once, "late" when the
            sums are done, "never" before this kernel ends.
        weights_first: with ``pdl``, also fill the load pipeline with weights before the wait;
            activations then pass through registers, which limits ``block_rows``.
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
    """cuBLAS, where it does not use split-K."""


GemmConfig = TritonConfig | CublasConfig

#: The kernel whose bits define the result; every other choice must equal it.
CANONICAL = TritonConfig(16, 32, 128, num_warps=4, num_stages=4)

_streamed = functools.partial(TritonConfig, tma=True, pdl=True, prefetch_bytes=0)

#: fp32 products do not use tensor cores: one small tile for all row counts.
FLOAT32 = TritonConfig(16, 32, 32, num_warps=4, num_stages=2)


class GemmChooser(Protocol):
    """Chooses the kernel of a shape and row count."""

    def choose(self, shape: GemmShape, rows: int) -> GemmConfig:
        """The kernel for ``rows`` rows of activations."""
        ...


@dataclass(frozen=True, slots=True)
class TuningTable:
    """Choices by shape and row bucket; other shapes get ``default_config``.

    Attributes:
        entries: measured choices.
        hopper: as for ``default_config``.
    """

    entries: Mapping[GemmShape, Mapping[int, GemmConfig]] = field(default_factory=dict)
    hopper: bool = False

    def choose(self, shape: GemmShape, rows: int) -> GemmConfig:
        """The kernel for ``rows`` rows of activations."""
        measured = self.entries.get(shape, {})
        chosen = measured.get(row_bucket(rows))
        return chosen if chosen is not None else default_config(shape, rows, self.hopper)

    def in_order(self, shape: GemmShape, rows: int) -> TritonConfig:
        """The default for row counts at which cuBLAS does not serve."""
        return in_order_config(shape, rows, self.hopper)

    def replaced(self, shape: GemmShape, bucket: int, config: GemmConfig) -> TuningTable:
        """This table with another choice for one bucket of one shape."""
        choices = {**self.entries.get(shape, {}), bucket: config}
        return replace(self, entries={**self.entries, shape: choices})

    def to_json(self) -> str:
        """The table as JSON text for ``from_json``."""
        rows = [
            dataclasses.asdict(shape)
            | {"choices": {str(bucket): _dumped(config) for bucket, config in choices.items()}}
            for shape, choices in self.entries.items()
        ]
        return json.dumps(rows, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str, hopper: bool = False) -> TuningTable:
        """Read a table.

        Args:
            text: from ``to_json``.
            source: the file's name, for error messages.
            hopper: as for ``default_config``.

        Raises:
            ConfigError: the text is not a tuning table.
        """
        try:
            return cls(dict(_entry(row) for row in json.loads(text)), hopper)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"tuning table {source} is malformed: {error!r}",
                "write it anew with benchmarks/kernels/gemm_gpu.py",
            ) from error


def row_bucket(rows: int) -> int:
    """The bucket of a row count."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])


def default_config(shape: GemmShape, rows: int, hopper: bool) -> GemmConfig:
    """The kernel of shapes that have not been tuned: what won for most of the tuned ones.

    Args:
        shape: of the product.
        rows: of activations.
        hopper: the chip has the wgmma, TMA and programmatic launches of a Hopper.
    """
    return CublasConfig() if hopper and rows > 64 else in_order_config(shape, rows, hopper)


def in_order_config(shape: GemmShape, rows: int, hopper: bool) -> TritonConfig:
    """The Triton kernel of shapes that have not been tuned; arguments as ``default_config``."""
    # TMA reads rows that begin at multiples of 16 bytes.
    if hopper and shape.in_features % 8 == 0:
        return _hopper_config(shape, rows)
    if rows > 64:
        warps = 8 if shape.epilogue == "silu_mul" else 4
        return TritonConfig(128, 64, 64, num_warps=warps, num_stages=3)
    programs = shape.out_features // (2 if shape.epilogue == "silu_mul" else 1)
    widths = (width for width in (64, 32) if programs // width >= MIN_PROGRAMS)
    width = next(widths, 16)
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    depth = 256 if width <= 32 and block_rows <= 32 else 128
    return TritonConfig(block_rows, width, depth, num_warps=4, num_stages=3)


def _hopper_config(shape: GemmShape, rows: int) -> TritonConfig:
    """Few programs, as of a narrow weight, need deep pipelines: 1 us of latency is 4.6 MB."""
    gated = shape.epilogue == "silu_mul"
    features = shape.out_features // (2 if gated else 1)
    narrow = features < NARROW
    if rows <= 16:
        if narrow:
            return _streamed(16, 64, 256, 4, 3 if gated else 5, tma_rows=False)
        stages = 3 if gated else 7 if features < MIDDLE else 4
        return TritonConfig(16, 64, 128, 4, stages, pdl=True, prefetch_bytes=1024)
    if rows <= 32:
        return _streamed(32, 64, 128, 4, 9 if narrow and not gated else 5)
    if rows <= 64:
        if gated:
            return _streamed(32, 64, 128, 4, 4) if narrow else _streamed(64, 64, 64, 4, 4)
        return _streamed(32, 64, 128, 4, 7) if narrow else _streamed(64, 64, 128, 4, 6)
    if rows <= 128 and not gated:
        return _streamed(64, 64, 128, 4, 4)
    return _streamed(128, 128, 64, 8, 4)


def load_table(
    device_name: str, folder: Traversable | None = None, hopper: bool = False
) -> TuningTable:
    """The tuned table of a device, for example "NVIDIA H200"; without entries if there is none.

    Raises:
        ConfigError: the table's file is malformed.
    """
    folder = folder or resources.files(__package__) / "tuned"
    file = folder / table_name(device_name)
    if not file.is_file():
        return TuningTable(hopper=hopper)
    return TuningTable.from_json(file.read_text(), file.name, hopper)


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

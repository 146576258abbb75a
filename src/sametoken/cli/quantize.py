"""``sametoken quantize``: write a quantized copy of a checkpoint."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sametoken.types.units import in_units


class Scheme(StrEnum):
    """How weights are quantized."""

    fp8_dynamic = "fp8-dynamic"
    w4a16 = "w4a16"


def write_quantized(
    model: Annotated[
        str, typer.Argument(help="a Hugging Face directory or hub id with unquantized weights")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="a new directory")],
    scheme: Annotated[
        Scheme, typer.Option(help="float8 weights and activations, or weights of 4 bits in groups")
    ] = Scheme.fp8_dynamic,
) -> None:
    """Write a quantized copy of a checkpoint, in the format of compressed-tensors.

    Weights are rounded to nearest, without data.
    """
    from sametoken.models.names import resolve_model
    from sametoken.models.quantize import quantize_checkpoint, require_new

    require_new(output)
    source = resolve_model(model, lambda line: typer.echo(line, err=True))
    done = quantize_checkpoint(source, output, scheme.value)
    typer.echo(
        f"{output}: {done.num_linears} linears in {scheme.value}, "
        f"{in_units(done.bytes_before)} of weights became {in_units(done.bytes_after)}"
    )

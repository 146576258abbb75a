"""``sametoken batch``: run a file of requests and write a file of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sametoken.cli.options import engine_options, options_of, take, with_options
from sametoken.config import DEFAULT_MODEL, MODEL_HELP, EngineConfig
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.ray.config import require_ray

REFUSED = 1


@with_options(options_of(BatchConfig), engine_options())
def batch(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="file of requests, one JSON object per line")
    ],
    output: Annotated[
        str, typer.Argument(metavar="OUT", help="file for the results, in the same order")
    ],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = DEFAULT_MODEL,
    **options: Any,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    After a stop or a crash, the same command continues with the remaining requests. Exits with 1
    if a line was refused or failed; its result says why.
    """
    given = take(options, BatchConfig)
    names = tuple(given.pop("served_model_name"))
    batch_config = BatchConfig(served_model_name=names, **given)
    if batch_config.ray:
        require_ray()
    config = EngineConfig.from_options(model=model, **options)

    from sametoken.serving.batch.run import run_batch

    summary = run_batch(config, Path(source), Path(output), batch_config)
    typer.echo(
        f"{output}: {summary.num_answered} answered, {summary.num_kept} kept from an earlier run, "
        f"{summary.num_refused} refused, {summary.num_failed} failed",
        err=True,
    )
    if summary.num_refused or summary.num_failed:
        raise typer.Exit(REFUSED)

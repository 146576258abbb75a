"""A batch from its input to its output, in this process or on Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.config import EngineConfig
from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.resolve import resolve_device, resolve_sizes
from sametoken.errors import ConfigError
from sametoken.server.app import create_app
from sametoken.server.batch.answers import (
    BATCH_LIMITS,
    Answer,
    answers_of,
    batch_server_config,
)
from sametoken.server.batch.config import BatchConfig
from sametoken.server.batch.journal import Journal, write_whole
from sametoken.server.batch.lines import BatchRequest, InputLine, read_input, to_line

#: What tokens depend on. Speculation is not among it: a run may go on with another drafter.
_SETTINGS = (
    "model",
    "tokenizer",
    "dtype",
    "device",
    "load_format",
    "max_model_len",
    "tensor_parallel_size",
)


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What became of the lines.

    Attributes:
        num_answered: by this run.
        num_kept: answered by an earlier run of the same batch.
        num_refused: without a response, since they are no requests.
    """

    num_answered: int
    num_kept: int
    num_refused: int


def run_batch(
    config: EngineConfig, source: Path, output: Path, batch_config: BatchConfig
) -> BatchSummary:
    """Answer every line of a file, once, into another file in the same order.

    Results are kept in ``OUTPUT.parts`` until all are there. A run that ended early is taken up
    by the same call, which redoes what was not finished, and nothing else.

    Raises:
        RequestError: the input cannot be read.
        ConfigError: the output is there already or cannot be written, another run holds it, or
            an earlier one had other settings.
        SametokenError: the engine cannot start, or is gone for good.
    """
    _require_free(output, source)
    lines = read_input(source, batch_config.max_line_bytes)
    parts = output.with_name(output.name + ".parts")
    settings = {name: getattr(config, name) for name in _SETTINGS}
    settings |= {
        "served_model_name": list(batch_config.served_model_name),
        "synthetic": list(config.synthetic),
    }
    with Journal(parts, settings) as journal:
        sound = [line for line in lines if isinstance(line.parse(), BatchRequest)]
        pending = [line for line in sound if line.key not in journal]
        if pending:
            answer_pending(config, batch_config, pending, journal.append)
        write_whole(output, (_result(line, journal) for line in lines))
        journal.remove()
    return BatchSummary(len(pending), len(sound) - len(pending), len(lines) - len(sound))


def _require_free(output: Path, source: Path) -> None:
    try:
        if not output.exists():
            return
        if source.exists() and output.samefile(source):
            raise ConfigError(f"{output} is the input itself", "choose another output")
        kind = "there already" if output.is_file() else "no regular file"
    except OSError as error:
        raise ConfigError(f"{output} cannot be used ({error})", "choose another output") from error
    raise ConfigError(f"{output} is {kind}", "remove it, or choose another output")


def answer_pending(
    config: EngineConfig,
    batch_config: BatchConfig,
    pending: Sequence[InputLine],
    take: Callable[[Iterable[Answer]], None],
) -> None:
    """Answer lines, telling each group of results as it comes.

    Raises:
        SametokenError: the engine cannot start, or is gone for good.
    """
    if batch_config.ray:
        from sametoken.server.batch.on_ray import answer_on_ray

        answer_on_ray(config, batch_config, pending, take)
        return
    asyncio.run(_answer_here(config, batch_config, pending, take))


async def _answer_here(
    config: EngineConfig,
    batch_config: BatchConfig,
    pending: Sequence[InputLine],
    take: Callable[[Iterable[Answer]], None],
) -> None:
    engine = await AsyncLLM.start(config, BATCH_LIMITS)
    try:
        app = create_app(engine, batch_server_config(batch_config.served_model_name))
        slots = resolve_sizes(config, resolve_device(config)).max_num_seqs
        concurrency = batch_config.concurrency or slots
        groups: AsyncGenerator[list[Answer], Any] = answers_of(app, pending, concurrency)
        async with aclosing(groups):
            async for group in groups:
                # The engine goes on while the disk is waited for.
                await asyncio.to_thread(take, group)
    finally:
        await engine.shutdown()


def _result(line: InputLine, journal: Journal) -> bytes:
    request = line.parse()
    return journal[line.key] if isinstance(request, BatchRequest) else to_line(request)

"""Runs a batch: the lines of a file are answered concurrently, in this process or on Ray."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, EngineDeadError, in_words
from sametoken.io.journal import Journal, write_whole
from sametoken.serving.async_llm import AsyncLLM
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.batch.lines import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    InputLine,
    read_input,
    to_line,
)
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.errors import ApiError, invalid
from sametoken.serving.http.in_process import AppRequest, whole_answer
from sametoken.serving.http.served import require_served
from sametoken.serving.limits import ServingLimits

_FORMAT = "sametoken-batch-1"
ANSWERED, KEPT, REFUSED, FAILED = "answered", "kept", "refused", "failed"


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Counts of lines.

    Attributes:
        num_answered: answered by this run.
        num_kept: answered by an earlier run of the same batch.
        num_refused: no requests, or answered with a status of 4xx.
        num_failed: answered with a status of 5xx.
    """

    num_answered: int
    num_kept: int
    num_refused: int
    num_failed: int = 0


def run_batch(
    config: EngineConfig, source: Path, output: Path, batch_config: BatchConfig
) -> BatchSummary:
    """Answer every line of a file once; write the results to another file in the same order.

    Results are kept in ``OUTPUT.parts`` until all are there. The same call resumes an
    interrupted run and answers only the missing lines.

    Raises:
        RequestError: the input cannot be read.
        ConfigError: the output exists or cannot be written, another run holds it, an earlier run
            had other settings, or an adapter has a name of the model.
        SametokenError: the engine cannot start, or will not be restarted.
    """
    batch_server_config(batch_config.served_model_name).require_apart(config)
    _require_free(output, source)
    lines = read_input(source, batch_config.max_line_bytes)
    parts = output.with_name(output.name + ".parts")
    names = {"served_model_name": list(batch_config.served_model_name)}
    settings = {"format": _FORMAT} | config.result_settings | names
    with Journal(parts, settings) as journal:
        valid = [line for line in lines if isinstance(line.parse(), BatchRequest)]
        pending = [line for line in valid if line.key not in journal]
        refused = dict(_refused(pending, config, batch_config))
        left = [line for line in pending if line.key not in refused]
        if left and batch_config.ray:
            from sametoken.serving.batch.on_ray import answer_on_ray

            answer_on_ray(config, batch_config, left, journal.append)
        elif left:
            asyncio.run(_answer_here(config, batch_config, left, journal.append))
        # Afterwards: an engine that cannot start leaves no parts.
        journal.append(refused.items())
        counts: Counter[str] = Counter()
        new = frozenset(line.key for line in pending)
        write_whole(output, _counted(lines, journal, new, counts))
        journal.remove()
    return BatchSummary(*(counts[outcome] for outcome in (ANSWERED, KEPT, REFUSED, FAILED)))


def _require_free(output: Path, source: Path) -> None:
    try:
        if not output.exists():
            return
        if source.exists() and output.samefile(source):
            raise ConfigError(f"{output} is the input itself", "choose another output")
        kind = "there already" if output.is_file() else "no regular file"
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be used ({in_words(error)})", "choose another output"
        ) from error
    raise ConfigError(f"{output} is {kind}", "remove it, or choose another output")


def _refused(
    lines: Iterable[InputLine], config: EngineConfig, batch_config: BatchConfig
) -> Iterator[Answer]:
    """Results of lines that no engine need be loaded for: none would serve them."""
    names = batch_server_config(batch_config.served_model_name).names(config.model)
    for line in lines:
        body = _request_of(line).body
        try:
            if body.get("stream"):
                raise invalid("a batch has no streams. Leave stream out", "stream", "unsupported")
            if isinstance(body.get("model"), str):
                require_served(body["model"], names, config.lora_modules)
        except ApiError as error:
            yield _to_answer(line, error.status, error.body)


async def _answer_here(
    config: EngineConfig,
    batch_config: BatchConfig,
    pending: Sequence[InputLine],
    take: Callable[[Iterable[Answer]], None],
) -> None:
    """Answer lines; ``take`` gets each group of finished results."""
    engine = await AsyncLLM.start(config, BATCH_LIMITS)
    try:
        app = create_app(engine, batch_server_config(batch_config.served_model_name))
        concurrency = batch_config.concurrency or engine.max_num_seqs
        async with aclosing(answers_of(app, pending, concurrency)) as groups:
            async for group in groups:
                # The engine runs while this waits for the disk.
                await asyncio.to_thread(take, group)
    finally:
        await engine.shutdown()


def _counted(
    lines: Iterable[InputLine], journal: Journal, new: frozenset[str], counts: Counter[str]
) -> Iterator[bytes]:
    """The results of all lines, whose outcomes are counted on the way."""
    for line in lines:
        request = line.parse()
        if not isinstance(request, BatchRequest):
            counts[REFUSED] += 1
            yield to_line(request)
            continue
        result = journal[line.key]
        status = json.loads(result)["response"]["status_code"]
        if status < 400:
            counts[ANSWERED if line.key in new else KEPT] += 1
        else:
            counts[REFUSED if status < 500 else FAILED] += 1
        yield result


#: The number of concurrent lines bounds a batch, not the queue.
BATCH_LIMITS = ServingLimits(max_waiting=2**31, max_waiting_tokens=2**62)
#: Engine deaths during one line after which the run is given up.
_MAX_LOST = 5
_RETRY_S = 1.0
_BUSY = frozenset({429, 503})
_SEED_BITS = 63

Answer = tuple[str, bytes]


def batch_server_config(served_model_name: tuple[str, ...]) -> ServerConfig:
    """Options of an application that serves only a batch."""
    return ServerConfig(
        served_model_name=served_model_name,
        max_completions=2**16,
        max_request_bytes=2**40,
        max_bodies_bytes=2**60,
    )


async def answers_of(
    app: ASGIApp, lines: Sequence[InputLine], concurrency: int
) -> AsyncGenerator[list[Answer], None]:
    """Keys and results in groups, as they finish.

    Args:
        app: the application.
        lines: lines with valid requests.
        concurrency: lines that run at once.

    Raises:
        EngineDeadError: the engine was lost too often during one line.
    """
    running: set[asyncio.Task[Answer]] = set()
    waiting = iter(lines)
    try:
        while True:
            for line in waiting:
                running.add(asyncio.ensure_future(_answer(app, line)))
                if len(running) >= concurrency:
                    break
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            yield [task.result() for task in done]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _answer(app: ASGIApp, line: InputLine) -> Answer:
    return _to_answer(line, *await _respond(app, _request_of(line), line.key))


def _request_of(line: InputLine) -> BatchRequest:
    request = line.parse()
    assert isinstance(request, BatchRequest)
    return request


def _to_answer(line: InputLine, status: int, body: dict[str, Any]) -> Answer:
    request_id = body.get("id") or f"req_{line.key}"
    response = BatchResponse(status_code=status, request_id=request_id, body=body)
    custom_id = _request_of(line).custom_id
    result = BatchResult(id=line.result_id, custom_id=custom_id, response=response)
    return line.key, to_line(result)


async def _respond(app: ASGIApp, request: BatchRequest, key: str) -> tuple[int, dict[str, Any]]:
    body = json.dumps(_with_seed(request.body, key)).encode()
    headers = ((b"content-type", b"application/json"),)
    sent = AppRequest("POST", request.url, headers=headers, body=body)
    num_lost = 0
    while num_lost < _MAX_LOST:
        status, text = await whole_answer(app, sent)
        answer: dict[str, Any] = json.loads(text)
        if status not in _BUSY:
            return status, answer
        num_lost += answer["error"]["code"] == "engine_dead"
        await asyncio.sleep(_RETRY_S)
    raise EngineDeadError(
        f"the engine was lost {_MAX_LOST} times under one request ({answer['error']['message']})",
        "the same command resumes the run",
    )


def _with_seed(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The body with a seed, so that a result does not depend on when and where its line runs."""
    if body.get("seed") is not None:
        return dict(body)
    return {**body, "seed": int(key, 16) % 2**_SEED_BITS}

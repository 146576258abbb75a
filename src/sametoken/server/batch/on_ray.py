"""Lines of a batch through Ray Data: blocks of lines over a pool of engines."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy
from ray.exceptions import ObjectLostError, RayError

from sametoken.config import EngineConfig
from sametoken.engine.async_llm import AsyncLLM
from sametoken.errors import EngineDeadError
from sametoken.server.app import create_app
from sametoken.server.batch.answers import (
    BATCH_LIMITS,
    Answer,
    answers_of,
    batch_server_config,
)
from sametoken.server.batch.config import BatchConfig
from sametoken.server.batch.lines import InputLine
from sametoken.server.ray.cluster import connect, device_on_ray, last_line, num_gpus

#: Blocks that an engine works on at once, so that one's last line keeps no device idle.
_BLOCKS_PER_ENGINE = 2
#: Times that all engines may be lost, one time after the other, before anything is answered.
_MAX_VAIN = 5
Result = TypeVar("Result")
_logger = logging.getLogger("sametoken.server")


class EngineActor:
    """One engine of the pool; its methods are called from several threads.

    Args:
        config: of the engine.
        served_model_name: see ``BatchConfig``.
        concurrency: lines of one block that run at once.

    Raises:
        SametokenError: the engine cannot start.
    """

    def __init__(
        self, config: EngineConfig, served_model_name: tuple[str, ...], concurrency: int
    ) -> None:
        self._concurrency = concurrency
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        engine = self._run(AsyncLLM.start(config, BATCH_LIMITS))
        self._app = create_app(engine, batch_server_config(served_model_name))

    def __call__(self, block: pa.Table) -> pa.Table:
        """Results of a block of lines: columns number and raw in, key and result out.

        One row without a key says why the engine cannot go on.
        """
        columns = block.to_pydict()
        lines = [InputLine(*pair) for pair in zip(columns["number"], columns["raw"], strict=True)]
        try:
            answers = self._run(self._answer(lines))
        except Exception as error:
            return pa.table({"key": [None], "result": [str(error).encode()]})
        keys, results = zip(*answers, strict=True)
        return pa.table({"key": keys, "result": results})

    async def _answer(self, lines: Sequence[InputLine]) -> list[Answer]:
        groups = [group async for group in answers_of(self._app, lines, self._concurrency)]
        return [answer for group in groups for answer in group]

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def answer_on_ray(
    config: EngineConfig,
    batch_config: BatchConfig,
    pending: Sequence[InputLine],
    take: Callable[[Iterable[Answer]], None],
) -> None:
    """Answer lines by a pool of engines, telling the results of each block as it comes.

    Results are recorded by this process alone. What an engine held that was lost, with its node
    or alone, is answered once the rest is, by the engines that there are then.

    Raises:
        EngineDeadError: an engine cannot start, or is gone for good.
    """
    is_ours = connect()
    try:
        config = replace(config, device=device_on_ray(config.device))
        left = {line.key: line for line in pending}
        num_vain = 0
        while left and num_vain < _MAX_VAIN:
            num_before = len(left)
            for answers in _answers(config, batch_config, list(left.values())):
                take(answers)
                for key, _ in answers:
                    del left[key]
            num_vain = 0 if len(left) < num_before else num_vain + 1
    except RayError as error:
        raise _gone(last_line(str(error))) from error
    finally:
        if is_ours:
            ray.shutdown()
    if left:
        raise _gone(f"they were lost {_MAX_VAIN} times")


def _answers(
    config: EngineConfig, batch_config: BatchConfig, lines: Sequence[InputLine]
) -> Iterator[list[Answer]]:
    """Answers block by block, without blocks that were lost with their engine.

    Raises:
        EngineDeadError: an engine is gone for good.
        RayError: an engine cannot start.
    """
    dataset = _dataset(config, batch_config, lines)
    dataset.context.max_errored_blocks = -1
    try:
        for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            columns = block.to_pydict()
            if None in columns["key"]:
                raise _gone(columns["result"][0].decode())
            yield list(zip(columns["key"], columns["result"], strict=True))
    except ObjectLostError as error:
        _logger.warning("results were lost with their node: %s", last_line(str(error)))


def _gone(cause: str) -> EngineDeadError:
    return EngineDeadError(
        f"the engines on Ray ended ({cause})",
        "once that is mended, the same command goes on with what is left",
    )


def _dataset(config: EngineConfig, batch_config: BatchConfig, pending: Sequence[InputLine]) -> Any:
    rows = [{"number": line.number, "raw": line.raw} for line in pending]
    concurrency = batch_config.concurrency or config.max_num_seqs
    per_block = -(-concurrency // _BLOCKS_PER_ENGINE)
    num_blocks = -(-len(rows) // per_block)
    return ray.data.from_items(rows, override_num_blocks=num_blocks).map_batches(
        EngineActor,
        fn_constructor_args=(config, batch_config.served_model_name, per_block),
        batch_format="pyarrow",
        batch_size=None,
        compute=ActorPoolStrategy(
            size=min(batch_config.replicas, num_blocks),
            max_tasks_in_flight_per_actor=_BLOCKS_PER_ENGINE,
            max_concurrent_calls_per_actor=_BLOCKS_PER_ENGINE,
            enable_true_multi_threading=True,
        ),
        # An engine that is lost comes back where there is room; its blocks do not wait for that.
        max_task_retries=0,
        num_cpus=batch_config.ray_num_cpus,
        num_gpus=num_gpus(config),
    )

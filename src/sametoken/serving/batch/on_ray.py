"""A batch on Ray Data: blocks of lines are distributed over a pool of engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy
from ray.exceptions import RayError

from sametoken.config import EngineConfig
from sametoken.errors import EngineDeadError
from sametoken.serving.async_llm import AsyncLLM
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.batch.lines import InputLine
from sametoken.serving.batch.run import BATCH_LIMITS, Answer, answers_of, batch_server_config
from sametoken.serving.http.app import create_app
from sametoken.serving.ray.serve import connect, device_on_ray, last_line, num_gpus, num_slots

#: Blocks that an engine works on at once, so that a block's last line does not idle the device.
_BLOCKS_PER_ENGINE = 2
Result = TypeVar("Result")


class EngineActor:
    """One engine of the pool; called from several threads.

    Args:
        config: the engine's options.
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
        """Results of a block of lines: columns number and raw in, key and result out."""
        columns = block.to_pydict()
        lines = [InputLine(*pair) for pair in zip(columns["number"], columns["raw"], strict=True)]
        answers = self._run(self._answer(lines))
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
    """Answer lines on a pool of engines; ``take`` gets the results of each finished block.

    Only this process records results. Ray runs a block again if its engine was lost.

    Raises:
        EngineDeadError: an engine cannot start, or will not be restarted.
    """
    is_ours = connect()
    try:
        config = replace(config, device=device_on_ray(config.device))
        for block in _dataset(config, batch_config, pending).iter_batches(
            batch_size=None, batch_format="pyarrow"
        ):
            columns = block.to_pydict()
            take(list(zip(columns["key"], columns["result"], strict=True)))
    except RayError as error:
        raise EngineDeadError(
            f"the engines on Ray ended ({last_line(str(error))})",
            "fix the cause; the same command resumes the run",
        ) from error
    finally:
        if is_ours:
            ray.shutdown()


def _dataset(config: EngineConfig, batch_config: BatchConfig, pending: Sequence[InputLine]) -> Any:
    rows = [{"number": line.number, "raw": line.raw} for line in pending]
    concurrency = batch_config.concurrency or num_slots(config)
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
        num_cpus=batch_config.ray_num_cpus,
        num_gpus=num_gpus(config),
    )

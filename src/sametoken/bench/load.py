"""Load on a server: when requests are sent, and how many may run."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from sametoken.bench.openai_stream import Clock, ServedRequest
from sametoken.bench.scrape import Counters
from sametoken.errors import ConfigError

#: Sends one body and fills the record.
Send = Callable[[Mapping[str, Any], ServedRequest], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come.

    Attributes:
        concurrency: how many run at once at most; None sets no bound.
        request_rate: requests per second on average, at times as a Poisson process has them;
            None makes all of them due at once.
        seed: of those times.

    Raises:
        ConfigError: a number is impossible.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency} is not possible", "use at least 1")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(
                f"request_rate={self.request_rate} is not possible", "use a number above 0"
            )

    def due(self, count: int) -> list[float]:
        """When each of ``count`` requests is due, in seconds; the first at once."""
        if self.request_rate is None:
            return [0.0] * count
        choose = random.Random(self.seed)
        gaps = (choose.expovariate(self.request_rate) for _ in range(count - 1))
        return list(accumulate(gaps, initial=0.0))[:count]


@dataclass(slots=True)
class LoadRun:
    """What one run brought.

    Attributes:
        start: when it began, in seconds of the clock.
        requests: in the order of their index.
        counters: what the server counted meanwhile; None if that is not known.
    """

    start: float
    requests: list[ServedRequest] = field(default_factory=list)
    counters: Counters | None = None

    @property
    def done(self) -> list[ServedRequest]:
        """Requests that were answered."""
        return [request for request in self.requests if request.error is None]

    @property
    def seconds(self) -> float:
        """From the start to the last token; 0 if none came."""
        return max((request.events[-1] for request in self.done), default=self.start) - self.start


async def run_load(
    send: Send,
    bodies: Sequence[Mapping[str, Any]],
    load: Load,
    *,
    advance: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> LoadRun:
    """Send every body when it is due, and wait for all answers.

    Args:
        send: sends one.
        bodies: of the requests, in order.
        load: when they are due and how many may run.
        advance: called whenever a request is done.
        clock: seconds.
    """
    bound = contextlib.nullcontext() if load.concurrency is None else _turns(load.concurrency)
    run = LoadRun(clock())

    async def one(index: int, body: Mapping[str, Any], due: float) -> None:
        record = ServedRequest(index, run.start + due)
        run.requests.append(record)
        await asyncio.sleep(max(0.0, record.arrival - clock()))
        async with bound:
            await send(body, record)
        advance()

    due = load.due(len(bodies))
    async with asyncio.TaskGroup() as tasks:
        for index, (body, at) in enumerate(zip(bodies, due, strict=True)):
            tasks.create_task(one(index, body, at))
    run.requests.sort(key=lambda record: record.index)
    return run


def _turns(concurrency: int) -> contextlib.AbstractAsyncContextManager[None]:
    return asyncio.Semaphore(concurrency)

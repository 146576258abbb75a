"""Ranks as threads of the test's process, of which one runs at a time.

A rank runs until it needs another, so a test is quick, always takes the same course, and may
use what is not safe in several threads, such as Triton's interpreter.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress

import torch

import sametoken.engine.build as build
from helpers.static_steps import in_steps
from sametoken.config import EngineConfig
from sametoken.engine.core import EngineCore
from sametoken.layers.parallel import TensorParallel
from sametoken.runner.stream import ImmediateStream, LaggingStream

PATIENCE_S = 60.0


class Meeting:
    """Where ranks exchange tensors, and the baton of whoever runs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._baton = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._brought: dict[int, dict[int, torch.Tensor]] = {}
        self._failure: BaseException | None = None

    def exchange(self, rank: int, turn: int, x: torch.Tensor) -> list[torch.Tensor]:
        """What every rank brings to its ``turn``-th exchange, in rank order."""
        self._brought.setdefault(turn, {})[rank] = x.clone()
        self._brought.pop(turn - 2, None)
        with self.waiting():
            try:
                self._barrier.wait(PATIENCE_S)
            except threading.BrokenBarrierError:
                raise RuntimeError("another rank has failed") from self._failure
        return [self._brought[turn][other] for other in range(self.size)]

    @contextmanager
    def running(self):
        """Within, this thread runs and no other does; its error is everybody's."""
        with self._baton:
            try:
                yield
            except BaseException as error:
                self._failure = self._failure or error
                self._barrier.abort()
                raise

    @contextmanager
    def waiting(self):
        """Within, others may run."""
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()


class ThreadGroup(TensorParallel):
    """``TensorParallel`` over threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting, self._turn = rank, meeting.size, meeting, 0

    def gather(self, x):
        return torch.stack(self._exchange("gather", x))

    def broadcast(self, x):
        return self._exchange("broadcast", x)[0]

    def _exchange(self, kind, x):
        self._turn += 1
        if self.rank == 0:
            self._meeting.calls.append((kind, tuple(x.shape)))
        return self._meeting.exchange(self.rank, self._turn, x)


def run_ranks(size: int, work: Callable[[ThreadGroup], object]) -> list:
    """What ``work`` returns on each rank."""
    meeting, results = Meeting(size), {}

    def run(rank: int) -> None:
        with meeting.running():
            results[rank] = work(ThreadGroup(rank, meeting))

    def run_quietly(rank: int) -> None:
        with suppress(Exception):
            run(rank)

    others = [threading.Thread(target=run_quietly, args=(r,), daemon=True) for r in range(1, size)]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join(PATIENCE_S)
    return [results[rank] for rank in range(size)]


class _Following:
    """A rank other than 0 while its engine is built, as ``Ranks``."""

    def __init__(self, parallel: ThreadGroup, meeting: Meeting, inbox: queue.Queue) -> None:
        self.parallel, self._meeting, self._inbox = parallel, meeting, inbox

    def reduce_min(self, number):
        return number

    def broadcast_object(self, value):
        return self.take()

    def stream(self, device, steps_in_flight):
        return ImmediateStream()

    def stopped_by_errors(self):
        return nullcontext()

    def take(self):
        with self._meeting.waiting():
            return self._inbox.get(timeout=PATIENCE_S)


class ThreadRanks:
    """Rank 0, as ``Ranks``; the others are threads that end when they are told."""

    def __init__(self, config: EngineConfig, meeting: Meeting) -> None:
        self.parallel = ThreadGroup(0, meeting)
        self._inboxes = []
        for rank in range(1, meeting.size):
            inbox: queue.Queue = queue.Queue()
            following = _Following(ThreadGroup(rank, meeting), meeting, inbox)
            args = (config, following, meeting)
            threading.Thread(target=_follow, args=args, daemon=True).start()
            self._inboxes.append(inbox)

    def reduce_min(self, number):
        return number

    def broadcast_object(self, value):
        self.send(value)
        return value

    def stream(self, device, steps_in_flight):
        return ImmediateStream() if steps_in_flight == 1 else LaggingStream()

    def stopped_by_errors(self):
        return nullcontext()

    def lead(self, runner):
        return _Leading(self, runner)

    def send(self, message) -> None:
        for inbox in self._inboxes:
            inbox.put(message)


class _Leading:
    def __init__(self, ranks: ThreadRanks, inner) -> None:
        self._ranks, self._inner = ranks, in_steps(inner)
        self.num_swaps = 0

    def submit(self, plan):
        self.num_swaps += len(plan.swap_outs)
        self._ranks.send(plan)
        return self._inner.submit(plan)


def _follow(config: EngineConfig, rank: _Following, meeting: Meeting) -> None:
    # What goes wrong here is raised where rank 0 waits.
    with suppress(Exception), meeting.running():
        runner = in_steps(build.build_follower(config, rank)[0])
        while (plan := rank.take()) is not None:
            runner.submit(plan).discard()


@contextmanager
def engine_over_threads(config: EngineConfig):
    """An engine whose ranks are threads, and their meeting; usable by this thread alone."""
    meeting = Meeting(config.tensor_parallel_size)
    started: list[ThreadRanks] = []

    def start(config, device):
        started.append(ThreadRanks(config, meeting))
        return started[0]

    original, build.start_ranks = build.start_ranks, start
    try:
        with meeting.running():
            core: EngineCore = build.build_engine(config)
            yield core, meeting
    finally:
        build.start_ranks = original
        for ranks in started:
            ranks.send(None)

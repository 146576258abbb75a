"""One program of a kernel in Gluon that runs in Python: its partitions take turns."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from helpers.gluon_shared import Product


@dataclass(slots=True)
class Partition:
    """A partition in a thread of its own, which runs while it has its turn."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: bool = False


class Program:
    """A program's place in the grid, its partitions, and its copies that are on their way.

    Args:
        place: its ids.
        grid: numbers of programs.
        seed: of the order of turns.

    Attributes:
        copies: on their way.
        products: likewise, of a partition by its thread, in order.
    """

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], seed: int) -> None:
        self.place, self.grid = place, grid
        self.copies: list[Callable[[], None]] = []
        self.products: dict[int, list[Product]] = defaultdict(list)
        self._random = random.Random(seed)
        self._current: Partition | None = None
        self._given_back = threading.Semaphore(0)
        self._error: BaseException | None = None

    def run_partitions(self, functions: list[Callable[[], None]]) -> None:
        """Run partitions to their ends, at each turn one of them, or one copy.

        Raises:
            AssertionError: some wait for ever, or what one of them raises.
        """
        partitions = [Partition(one) for one in functions]
        threads = [threading.Thread(target=self._run, args=(one,)) for one in partitions]
        for thread in threads:
            thread.start()
        while turns := self._turns(partitions):
            self._random.choice(turns)()
        self._current, waiting = None, [one for one in partitions if not one.ended]
        for one in waiting:
            one.ended = True
            one.turn.release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        assert not waiting, f"{len(waiting)} partitions wait for ever"

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let a partition go on once ``ready``; often others have their turns first."""
        partition = self._current
        if partition is None:
            while not ready():
                self._copy(self._random.randrange(len(self.copies)))
        elif not ready() or self._random.random() < 0.5:
            partition.ready = ready
            self._given_back.release()
            partition.turn.acquire()
            if partition.ended:
                raise _StopError
            partition.ready = lambda: True

    def _turns(self, partitions: list[Partition]) -> list[Callable[[], None]]:
        if self._error is not None:
            return []
        able = [one for one in partitions if not one.ended and one.ready()]
        copies = [partial(self._copy, place) for place in range(len(self.copies))]
        return [*(partial(self._give_turn, one) for one in able), *copies]

    def _give_turn(self, partition: Partition) -> None:
        self._current = partition
        partition.turn.release()
        self._given_back.acquire()

    def _copy(self, place: int) -> None:
        self.copies.pop(place)()

    def _run(self, partition: Partition) -> None:
        partition.turn.acquire()
        try:
            if not partition.ended:
                partition.run()
        except _StopError:
            return
        except BaseException as error:
            self._error = error
        partition.ended = True
        self._given_back.release()


class _StopError(Exception):
    """Another partition has failed, or all wait for ever."""

"""One program of a kernel in Gluon that runs in Python: its partitions take turns."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from greenlet import greenlet

from helpers.gluon_shared import Product


@dataclass(slots=True)
class Partition:
    """A partition, which runs while it has its turn; threads would take longer to change turns."""

    run: greenlet
    ready: Callable[[], bool] = lambda: True


class Program:
    """A program's place in the grid, its partitions, and its copies that are on their way.

    Args:
        place: its ids.
        grid: numbers of programs.
        seed: of the order of turns.

    Attributes:
        copies: on their way.
        products: likewise, of a partition, in order.
    """

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], seed: int) -> None:
        self.place, self.grid = place, grid
        self.copies: list[Callable[[], None]] = []
        self.products: dict[greenlet, list[Product]] = defaultdict(list)
        self._random = random.Random(seed)
        self._current: Partition | None = None

    def run_partitions(self, functions: list[Callable[[], None]]) -> None:
        """Run partitions to their ends, at each turn one of them, or one copy.

        Raises:
            AssertionError: some wait for ever, or what one of them raises.
        """
        partitions = [Partition(greenlet(one)) for one in functions]
        try:
            while turns := self._turns(partitions):
                self._random.choice(turns)()
            waiting = [one for one in partitions if not one.run.dead]
            assert not waiting, f"{len(waiting)} partitions wait for ever"
        finally:
            self._current = None
            for one in partitions:
                one.run.throw()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let a partition go on once ``ready``; often others have their turns first."""
        partition = self._current
        if partition is None:
            while not ready():
                self._copy(self._random.randrange(len(self.copies)))
        elif not ready() or self._random.random() < 0.5:
            partition.ready = ready
            partition.run.parent.switch()
            partition.ready = lambda: True

    def _turns(self, partitions: list[Partition]) -> list[Callable[[], None]]:
        able = [one for one in partitions if not one.run.dead and one.ready()]
        copies = [partial(self._copy, place) for place in range(len(self.copies))]
        return [*(partial(self._give_turn, one) for one in able), *copies]

    def _give_turn(self, partition: Partition) -> None:
        self._current = partition
        partition.run.switch()

    def _copy(self, place: int) -> None:
        self.copies.pop(place)()

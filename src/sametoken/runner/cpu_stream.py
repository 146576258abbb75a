"""The CPU's stream: steps use all cores, or one thread while other processes take the cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sametoken.io.cores import SPINS_BRIEFLY, num_usable_cores
from sametoken.runner.stream import DONE, Event, Work

#: Seconds of work that are measured together, far above another process's time slice.
MEASURED_S = 0.05

#: Cores that all threads had together, below which one thread would take less time.
STARVED = 0.7

#: Likewise where threads that wait for each other spin on: that counts as having a core, and two
#: threads of which one has to wait for its core have one and a half.
STARVED_SPINNING = 1.5

#: Cores that one thread had, above which hardly anything else ran on its core.
UNDISTURBED = 0.9

#: Seconds on one thread before all are tried again: at first, and at most after trials in vain.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 64.0


@dataclass(slots=True)
class CpuStream:
    """Runs work inside ``submit``, on torch's number of threads, fewer, or one.

    The threads of a step wait for each other some 250 times. Where other processes take the cores,
    each wait can last a time slice, and one thread is several times faster than two
    (docs/decisions/0042). Results do not depend on the number of threads
    (tests/unit/ops/test_batch_invariance.py).

    Attributes:
        most_threads: maximum number of threads.
        starved: number of cores for all threads together, below which one thread runs.
        wall_s, cpu_s: clocks; the latter counts seconds of cores that this process had.
    """

    most_threads: int = field(default_factory=num_usable_cores)
    wall_s: Callable[[], float] = time.perf_counter
    cpu_s: Callable[[], float] = time.process_time
    starved: float = STARVED if SPINS_BRIEFLY else STARVED_SPINNING
    _one_thread: bool = False
    _pause_s: float = FIRST_PAUSE_S
    _paused_s: float = 0.0
    _measured_wall_s: float = 0.0
    _measured_cpu_s: float = 0.0

    def submit(self, work: Work) -> Event:
        """Run the work now."""
        of_user = torch.get_num_threads()
        if of_user == 1:
            work()
            return DONE
        wall_s, cpu_s = self.wall_s(), self.cpu_s()
        torch.set_num_threads(1 if self._one_thread else min(of_user, self.most_threads))
        try:
            work()
        finally:
            torch.set_num_threads(of_user)
        self._measured_wall_s += self.wall_s() - wall_s
        self._measured_cpu_s += self.cpu_s() - cpu_s
        if self._measured_wall_s >= MEASURED_S:
            self._choose(self._measured_wall_s, self._measured_cpu_s / self._measured_wall_s)
            self._measured_wall_s = self._measured_cpu_s = 0.0
        return DONE

    def _choose(self, wall_s: float, num_cores: float) -> None:
        """Choose the number of threads by the cores that the process had, on average."""
        if not self._one_thread:
            self._one_thread, self._paused_s = num_cores < self.starved, 0.0
            if not self._one_thread:
                self._pause_s = FIRST_PAUSE_S
            return
        self._paused_s += wall_s
        if self._paused_s >= self._pause_s and num_cores > UNDISTURBED:
            self._one_thread = False
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

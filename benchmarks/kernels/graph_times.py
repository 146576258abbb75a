"""What the scripts share: times inside CUDA graphs, and compilation in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

Operand = TypeVar("Operand")

COMPILERS = min(15, os.cpu_count() or 1)


def graph_of(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def replayed(
    launch: Callable[[], object], replays: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Milliseconds of each of several replays of a graph of ``launch``.

    ``before`` is called before each, and not timed.
    """
    graph = graph_of(launch)
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return times


def microseconds(
    call: Callable[[Operand], object], operands: Sequence[Operand], replays: int = 5
) -> float:
    """Time one call: the best of several replays of a graph with one call per operand.

    Operands larger than L2 in sum are read from memory each time.
    """

    def launch() -> None:
        for operand in operands:
            call(operand)

    return min(replayed(launch, replays)) * 1e3 / len(operands)


class Sustained(NamedTuple):
    """A call again and again, when the chip is as warm as under load: one call's time, and power.

    Attributes:
        microseconds: of one call.
        watts: of the chip.
    """

    microseconds: float
    watts: float


def sustained(
    call: Callable[[Operand], object], operands: Sequence[Operand], seconds: float = 0.8
) -> Sustained:
    """Run a graph with one call per operand for ``seconds``, after half as long unmeasured.

    A chip at its power limit lowers its clock, so what saves power is faster then.
    """
    import pynvml

    pynvml.nvmlInit()
    chip = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    graph = graph_of(lambda: [call(operand) for operand in operands])

    def run(for_seconds: float) -> tuple[int, float, float]:
        """Replays, their seconds, and joules."""
        joules, begun, replays = pynvml.nvmlDeviceGetTotalEnergyConsumption(chip), time.time(), 0
        while time.time() - begun < for_seconds:
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
            replays += 20
        used = pynvml.nvmlDeviceGetTotalEnergyConsumption(chip) - joules
        return replays, time.time() - begun, used / 1e3

    run(seconds / 2)
    replays, elapsed, joules = run(seconds)
    return Sustained(1e6 * elapsed / (replays * len(operands)), joules / elapsed)


def compile_in_parallel() -> None:
    """Run this very command in ``COMPILERS`` processes, each to compile its share."""
    command = [sys.executable, *sys.argv, "--compile"]
    workers = [subprocess.Popen([*command, str(index)]) for index in range(COMPILERS)]
    for worker in workers:
        worker.wait()

"""Time of one call inside a CUDA graph with one call per operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Operand = TypeVar("Operand")


def microseconds(
    call: Callable[[Operand], object], operands: Sequence[Operand], replays: int = 5
) -> float:
    """Time one call: the best of several replays of a graph over all operands.

    Operands larger than L2 in sum are read from memory each time.
    """
    call(operands[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operand in operands:
            call(operand)
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times) * 1e3 / len(operands)

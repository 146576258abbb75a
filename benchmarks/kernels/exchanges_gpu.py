"""Microseconds of a sum of all ranks' partial sums, between two GPUs or more, inside CUDA graphs.

    python benchmarks/kernels/exchanges_gpu.py [--ranks N] [--rows N...] [--width N] [--late US]

For each number of rows: by kernels and by NCCL; then what it adds where one rank in turn comes late
by so many microseconds, as ranks of an engine do.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from sametoken.distributed.peer_group import peer_group
from sametoken.distributed.process_group import NcclGroup, ProcessGroup
from sametoken.ops.model import partial_sum as reference
from sametoken.ops.model import partial_sum_triton

SUMS, REPLAYS = 20, 8
BF16 = torch.bfloat16


def by_nccl(group: NcclGroup, own: torch.Tensor) -> torch.Tensor:
    return partial_sum_triton.partial_sum(group.gather(own), BF16)


def by_kernels(group: ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    return group.sum(None, own, BF16)


def graph_of(launch: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """A graph of the launches 0, 1, ..."""
    with torch.cuda.stream(torch.cuda.Stream()):
        launch(0)
        launch(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(SUMS):
            launch(index)
    return graph


def median_us(graph: torch.cuda.CUDAGraph, meeting: torch.cuda.CUDAGraph) -> float:
    """Of one launch of a graph; in ``meeting`` all ranks end at about the same time."""
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        meeting.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / SUMS)
    return sorted(times)[REPLAYS // 2]


def in_turns(sum_up: Callable[[], object], rank: int, size: int, cycles: int, index: int) -> object:
    if index % size == rank:
        torch.cuda._sleep(cycles)
    return sum_up()


def measure(rank: int, arguments: argparse.Namespace, file: str) -> None:
    size = arguments.ranks
    torch.cuda.set_device(rank)
    store = dist.FileStore(file, size)
    group = peer_group(rank, size, store)
    if group is None:
        raise SystemExit("the GPUs do not reach each other's memory")
    with Path(file).open("rb", buffering=0) as opened:
        nccl = NcclGroup(rank, size, dist.PrefixStore("nccl", store), opened)
        generator = torch.Generator("cuda").manual_seed(0)
        meeting = graph_of(lambda index: group.gather(torch.zeros(1, device="cuda")))
        cycles = 1_000_000
        cycles *= arguments.late / median_us(
            graph_of(lambda index: torch.cuda._sleep(cycles)), meeting
        )
        for rows in arguments.rows:
            parts = torch.randn(size, rows, arguments.width, device="cuda", generator=generator)
            wanted, own = reference.partial_sum(parts, BF16, None), parts[rank].clone()
            found = {
                "kernels": partial(by_kernels, group, own),
                "NCCL": partial(by_nccl, nccl, own),
            }
            for name, sum_up in found.items():
                assert torch.equal(sum_up(), wanted)
                alone = median_us(graph_of(lambda index, call=sum_up: call()), meeting)
                late = partial(in_turns, sum_up, rank, size, int(cycles))
                waited = median_us(graph_of(late), meeting) - arguments.late
                if rank == 0:
                    print(
                        f"{rows:6} rows, {name:8} {alone:8.1f} us; after a rank that is "
                        f"{arguments.late} us late {waited:8.1f}",
                        flush=True,
                    )
        torch.cuda.synchronize()
    # Groups of NCCL wait for each other when a process ends.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 192, 320, 512, 2048])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--late", type=int, default=1000)
    with tempfile.NamedTemporaryFile() as file:
        arguments = (parser.parse_args(), file.name)
        multiprocessing.spawn(measure, arguments, nprocs=arguments[0].ranks)


if __name__ == "__main__":
    main()

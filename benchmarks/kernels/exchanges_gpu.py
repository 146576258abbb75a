"""Microseconds of a sum of all ranks' partial sums, between two GPUs or more, inside CUDA graphs.

    python benchmarks/kernels/exchanges_gpu.py [--ranks N] [--rows N...] [--width N] [--late US]

For each number of rows: by kernels and by NCCL; then what it adds where one rank in turn comes late
by so many microseconds, as ranks of an engine do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from graph_times import graph_of, replayed
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


def median_us(launch: Callable[[int], object], meet: Callable[[], object]) -> float:
    """Of one of the launches 0, 1, ... in a graph; at ``meet`` all ranks end at about one time."""

    def launches() -> None:
        for index in range(SUMS):
            launch(index)

    return statistics.median(replayed(launches, REPLAYS, meet)) * 1e3 / SUMS


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
        flag = torch.zeros(1, device="cuda")
        # Long enough for the host to launch what is timed behind it.
        meet = graph_of(lambda: [group.gather(flag) for _ in range(SUMS)]).replay
        cycles = 1_000_000
        late_cycles = (
            cycles * arguments.late / median_us(lambda index: torch.cuda._sleep(cycles), meet)
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
                alone = median_us(lambda index, call=sum_up: call(), meet)
                late = partial(in_turns, sum_up, rank, size, int(late_cycles))
                waited = median_us(late, meet) - arguments.late
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

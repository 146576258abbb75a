"""Time attention on the GPU at hand, for Qwen3-8B's heads, and compare bits between forms.

    python benchmarks/attention_gpu.py

Times are of one layer inside a CUDA graph that walks over several layers' KV, so KV comes from
memory. GB/s counts KV read once per window. ``decode_gpu.py`` times the same cuts in whole steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources

from sametoken.kernels.attention.triton import (
    SPLIT,
    AttentionConfig,
    attention,
    choose,
    new_arrivals,
)
from sametoken.kernels.attention.tuning import BUSY_PROGRAMS
from sametoken.kernels.interface import AttentionRows, AttentionShape, LayerKV

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128)
GROUP = SHAPE.num_heads // SHAPE.num_kv_heads
BLOCK_SIZE = 64
ROTATED_BYTES = 300 << 20
MAX_LAYERS = 36
TABLE_BLOCKS = 40960 // BLOCK_SIZE
COMPILERS = 14

#: Batch and window of prefill, for which time alone is of interest.
ALONE = ((1, 512), (4, 512))

#: Bits are compared over these: window (None: ragged) and cut.
FORMS = (
    (1, AttentionConfig("spread", 16, 4, 3)), (1, AttentionConfig("joined", 16, 4, 3)),
    (1, AttentionConfig("walk", 16, 2, 2)), (4, AttentionConfig("joined", 16, 2, 2)),
    (4, AttentionConfig("walk", 16, 8, 3)), (8, AttentionConfig("joined", 32, 4, 2)),
    (8, AttentionConfig("walk", 32, 2, 2, kv_left=False)),
    (64, AttentionConfig("spread", 32, 8, 3)), (64, AttentionConfig("walk", 64, 8, 3)),
    (64, AttentionConfig("walk", 64, 4, 2, kv_left=False)),
    (64, AttentionConfig("walk", 128, 8, 2, kv_left=False)),
    (None, AttentionConfig("walk", 16, 4, 3)), (None, AttentionConfig("walk", 32, 4, 3)),
)  # fmt: skip


class Scene:
    """A batch of slots with equal contexts, over several layers of shuffled blocks."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        blocks_per_slot = -(-context // BLOCK_SIZE)
        num_blocks = batch * blocks_per_slot + 1
        layer = (2, num_blocks, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
        layer_bytes = 2 * torch.Size(layer).numel()
        num_layers = min(MAX_LAYERS, max(2, -(-ROTATED_BYTES // layer_bytes)))
        memory = torch.empty((num_layers, *layer), dtype=torch.bfloat16, device="cuda").normal_()
        self.layers = [LayerKV(part[0], part[1]) for part in memory]
        blocks = torch.randperm(num_blocks - 1, device="cuda").view(batch, blocks_per_slot)
        self.table = torch.zeros(batch, TABLE_BLOCKS, dtype=torch.int64, device="cuda")
        self.table[:, :blocks_per_slot] = blocks

    def inputs(self, window: int) -> tuple[torch.Tensor, AttentionRows]:
        """The last ``window`` rows of every slot."""
        positions = torch.arange(self.context - window, self.context, device="cuda")
        slots = torch.arange(self.batch, device="cuda").repeat_interleave(window)
        rows = AttentionRows(positions.repeat(self.batch), slots, slots, self.table)
        size = (len(slots), SHAPE.num_heads, SHAPE.head_dim)
        return torch.randn(size, dtype=torch.bfloat16, device="cuda"), rows


def cuts(batch: int, window: int) -> list[AttentionConfig]:
    """What is worth trying for a batch of windows."""
    cut = AttentionConfig("walk", 16, 2, 2)
    if window * GROUP > 128:
        kv_left = [replace(cut, block_queries=32, num_warps=4, num_stages=s) for s in (3, 2)]
        q_left = replace(cut, kv_left=False)
        return kv_left + [
            replace(q_left, block_queries=queries, num_warps=warps, num_stages=stages)
            for queries, warps in ((32, 2), (64, 4), (128, 8))
            for stages in (2, 3)
        ]
    shapes = [(4, 3), (4, 2), (2, 2), (2, 3)]
    if window * GROUP > 16:
        cut = replace(cut, block_queries=32)
    shaped = [replace(cut, num_warps=warps, num_stages=stages) for warps, stages in shapes]
    joined = [replace(one, form="joined") for one in shaped]
    tiles = cut.num_tiles(batch * window, window, GROUP) * SHAPE.num_kv_heads
    if tiles < BUSY_PROGRAMS:
        return [replace(shaped[0], form="spread"), *joined, replace(joined[2], programs=1024)]
    several = [replace(one, programs=count) for one in joined[1:3] for count in (1024, 2560)]
    return [*shaped, *several]


def microseconds(call: Callable[[LayerKV], object], layers: list[LayerKV]) -> float:
    """Time of one layer, from the best of ten replays of a graph over all layers."""
    call(layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            call(layer)
    times = []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times) * 1e3 / len(layers)


def name_of_cut(cut: AttentionConfig) -> str:
    left = "" if cut.kv_left else "q"
    programs = "" if cut.programs == 2 * BUSY_PROGRAMS else f"p{min(cut.programs, 9999)}"
    return f"{cut.form}{cut.block_queries}w{cut.num_warps}s{cut.num_stages}{left}{programs}"


def measure(scene: Scene, window: int, cut: AttentionConfig) -> float | None:
    q, rows = scene.inputs(window)
    arrivals = new_arrivals(q.device)

    def call(layer: LayerKV) -> torch.Tensor:
        return attention(
            q, SHAPE, rows, layer, window=window, config=cut, arrivals=arrivals,
            max_seq_len=scene.context,
        )  # fmt: skip

    try:
        return microseconds(call, scene.layers)
    except OutOfResources:
        return None


def compile_share(index: int) -> None:
    """Compile one share of all kernels into Triton's cache; run in its own process."""
    scene = Scene(1, 320)
    cases = [*itertools.product((1, 8, 64), (1, 4, 6)), *ALONE]
    jobs = [*FORMS, *((1, cut) for case in cases for cut in cuts(*case))]
    for window, cut in list(dict.fromkeys(jobs))[index::COMPILERS]:
        q, rows = scene.inputs(window or 64)
        with contextlib.suppress(OutOfResources):
            attention(q, SHAPE, rows, scene.layers[0], window=window, config=cut)


def check_bits(context: int) -> None:
    """Decode, verify and prefill rows of the same positions, bit for bit."""
    scene = Scene(1, context)
    q, rows = scene.inputs(64)
    results: dict[tuple, torch.Tensor] = {}
    for window, cut in FORMS:
        with contextlib.suppress(OutOfResources):
            out = attention(q, SHAPE, rows, scene.layers[0], window=window, config=cut)
            results[window, cut] = out
    first = next(iter(results.values()))
    differing = [
        (window, name_of_cut(cut))
        for (window, cut), out in results.items()
        if not torch.equal(out, first)
    ]
    equal = f"all {len(results)} forms equal"
    print(f"bits at context {context}, split {SPLIT}: {differing or equal}")


def time_case(batch: int, window: int, context: int) -> None:
    """One line: the cuts, the best first."""
    scene = Scene(batch, context)
    times = {cut: measure(scene, window, cut) for cut in cuts(batch, window)}
    found = sorted((time, name_of_cut(cut)) for cut, time in times.items() if time is not None)
    rate = batch * context * SHAPE.kv_size * 2 * 2 / found[0][0] / 1e3
    chosen = choose(batch * window, SHAPE, window, context, torch.bfloat16)
    listed = ", ".join(f"{name} {time:.1f}" for time, name in found)
    print(
        f"| {batch}x{window} at {context} | {rate:.0f} | {name_of_cut(chosen)} | {listed} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    if options.compile is not None:
        compile_share(options.compile)
        return
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--compile", str(index)])
        for index in range(COMPILERS)
    ]
    for worker in workers:
        worker.wait()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    check_bits(530)
    check_bits(1100)
    print("| batch x window at context | GB/s | chosen | all, us |\n|---|---|---|---|")
    for context, batch, window in itertools.product((640, 4096), (1, 8, 64), (1, 4, 6)):
        time_case(batch, window, context)
        torch.cuda.empty_cache()
    for batch, window in ALONE:
        time_case(batch, window, window)


if __name__ == "__main__":
    main()

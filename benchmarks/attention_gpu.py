"""Time attention on the GPU at hand, for Qwen3-8B's heads, and compare bits between forms.

    python benchmarks/attention_gpu.py [--quick]

Times are of one layer inside a CUDA graph that walks over several layers' KV, so KV comes from
memory. GB/s counts KV read once per window.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable

import torch
from triton.runtime.errors import OutOfResources

from sametoken.kernels.attention.triton import SPLIT, AttentionConfig, attention, choose
from sametoken.kernels.interface import AttentionRows, AttentionShape, LayerKV

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128)
BLOCK_SIZE = 16
ROTATED_BYTES = 300 << 20
MAX_LAYERS = 36
TABLE_BLOCKS = 40960 // BLOCK_SIZE
#: Positions per loop turn: part of a row's arithmetic, as the split is.
TILES = (64, 128)
COMPILERS = 14

#: Bits are compared over these: window (None: ragged), spread, queries, warps.
FORMS = (
    (1, True, 16, 4), (1, False, 16, 4), (4, True, 16, 4), (4, False, 16, 8),
    (8, True, 32, 4), (64, True, 32, 8), (64, False, 64, 8),
    (None, False, 16, 4), (None, False, 32, 4), (None, False, 64, 8),
)  # fmt: skip
PREFILL = ((16, 4), (32, 4), (64, 8))

#: Query tile, warps, stages and tile of the decode cuts; those of 32 queries for window 6.
SPREAD = ((16, 4, 3, 64), (16, 4, 5, 64), (16, 4, 3, 128), (32, 4, 5, 64), (32, 4, 3, 128))
WALK = (
    (16, 2, 3, 64), (16, 4, 2, 64), (16, 4, 3, 64), (16, 4, 4, 64), (16, 4, 5, 64),
    (16, 4, 2, 128), (16, 4, 3, 128), (16, 8, 3, 128),
    (32, 4, 3, 64), (32, 4, 5, 64), (32, 4, 3, 128), (32, 8, 3, 128),
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


def label(config: AttentionConfig) -> str:
    form = "spread" if config.spread else "walk"
    return f"{form} q{config.block_queries} w{config.num_warps} s{config.num_stages} t{config.tile}"


def measure(
    scene: Scene, window: int, ragged: bool, config: AttentionConfig, bound: int | None
) -> float | None:
    q, rows = scene.inputs(window)

    def call(layer: LayerKV) -> torch.Tensor:
        return attention(
            q, SHAPE, rows, layer,
            window=None if ragged else window, max_seq_len=bound, config=config,
        )  # fmt: skip

    try:
        return microseconds(call, scene.layers)
    except OutOfResources:
        return None


def decode_configs(window: int, quick: bool) -> list[AttentionConfig]:
    wide = window * SHAPE.num_heads // SHAPE.num_kv_heads > 16
    configs = [
        AttentionConfig(spread, queries, warps, stages, tile=tile)
        for spread, cuts in ((True, SPREAD), (False, WALK))
        for queries, warps, stages, tile in cuts
        if wide or queries == 16
    ]
    return [config for config in configs if not quick or config.num_stages == 5]


def report(what: str, times: dict[AttentionConfig, float], kv_bytes: int) -> None:
    """One line per case: the cuts of each form, the best first."""
    cells = []
    for spread in (True, False):
        found = sorted((time, label(c)) for c, time in times.items() if c.spread == spread)
        rate = f" ({kv_bytes / found[0][0] / 1e3:.0f} GB/s)" if found else "-"
        cells.append(", ".join(f"{name} {time:.1f}" for time, name in found) + rate)
    print(f"| {what} | {' | '.join(cells)} |", flush=True)


def launches(quick: bool) -> list[tuple[int | None, AttentionConfig]]:
    """Every launch this run will make, as window (None: ragged) and cut."""
    found = [
        (window, AttentionConfig(spread, queries, warps, 3, tile=tile))
        for tile, (window, spread, queries, warps) in itertools.product(TILES, FORMS)
    ]
    found += [(window, config) for window in (1, 6) for config in decode_configs(window, quick)]
    found += [(None, config) for config in prefill_configs()]
    return list(dict.fromkeys(found))


def prefill_configs() -> list[AttentionConfig]:
    cuts = itertools.product(TILES, PREFILL)
    return [AttentionConfig(False, queries, warps, 3, tile=tile) for tile, (queries, warps) in cuts]


def compile_share(index: int, quick: bool) -> None:
    """Compile one share of all kernels into Triton's cache; run in its own process."""
    scene = Scene(1, 320)
    for window, config in launches(quick)[index::COMPILERS]:
        q, rows = scene.inputs(window or 64)
        with contextlib.suppress(OutOfResources):
            attention(q, SHAPE, rows, scene.layers[0], window=window, config=config)


def check_bits(context: int) -> None:
    """Decode, verify and prefill rows of the same positions, bit for bit, per tile."""
    scene = Scene(1, context)
    q, rows = scene.inputs(64)
    for tile in TILES:
        results: dict[tuple, torch.Tensor] = {}
        for window, spread, queries, warps in FORMS:
            config = AttentionConfig(spread, queries, warps, 3, tile=tile)
            with contextlib.suppress(OutOfResources):
                out = attention(q, SHAPE, rows, scene.layers[0], window=window, config=config)
                results[window, spread, queries, warps] = out
        first = next(iter(results.values()))
        differing = [form for form, out in results.items() if not torch.equal(out, first)]
        equal = f"all {len(results)} forms equal"
        print(f"bits at context {context}, split {SPLIT}, tile {tile}: {differing or equal}")


def time_decode(quick: bool) -> None:
    print("| case | spread, us | walk, us |\n|---|---|---|")
    for context, batch in itertools.product((530, 4096), (1, 8, 32, 64)):
        scene = Scene(batch, context)
        kv_bytes = batch * context * SHAPE.kv_size * 2 * 2
        for window in (1, 6) if batch == 32 else (1, 4, 6):
            measured = {
                config: measure(scene, window, False, config, context)
                for config in decode_configs(window, quick)
            }
            times = {config: time for config, time in measured.items() if time is not None}
            report(f"context {context} batch {batch} window {window}", times, kv_bytes)
            for bound in (context, None):
                capacity = bound or TABLE_BLOCKS * BLOCK_SIZE
                config = choose(batch * window, SHAPE, window, capacity, torch.bfloat16)
                time = measure(scene, window, False, config, bound)
                print(
                    f"chosen for window {window}, room for {capacity}: {label(config)} {time:.1f}"
                )
        del scene
        torch.cuda.empty_cache()


def time_prefill() -> None:
    for length in (512, 2048):
        scene = Scene(1, length)
        flops = 2 * SHAPE.q_size * length * length
        for config in prefill_configs():
            time = measure(scene, length, True, config, length)
            if time is not None:
                rate = flops / time / 1e6
                print(f"prefill {length}: {label(config)} {time:.1f} us, {rate:.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few cuts per form")
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    if options.compile is not None:
        compile_share(options.compile, options.quick)
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
    time_decode(options.quick)
    time_prefill()


if __name__ == "__main__":
    main()

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

from sametoken.kernels.attention.triton import AttentionConfig, attention, choose
from sametoken.kernels.interface import AttentionRows, AttentionShape, LayerKV

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128)
BLOCK_SIZE = 16
ROTATED_BYTES = 300 << 20
MAX_LAYERS = 36
TABLE_BLOCKS = 40960 // BLOCK_SIZE
SPLITS = (64, 128, 256)
COMPILERS = 12

#: Bits are compared over these: window (None: ragged), spread, queries, warps.
FORMS = (
    (1, True, 16, 4), (1, False, 16, 4), (4, True, 16, 4), (4, False, 16, 8),
    (8, True, 32, 4), (64, True, 32, 8), (64, False, 64, 8),
    (None, False, 16, 4), (None, False, 32, 4), (None, False, 64, 8),
)  # fmt: skip
PREFILL = ((16, 4), (32, 4), (32, 8), (64, 8))


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
    return f"{form} q{config.block_queries} w{config.num_warps} s{config.num_stages}"


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
    queries = 16 if window * 4 <= 16 else 32
    warps_stages = [(4, 5)] if quick else [(4, 3), (4, 5), (4, 7)]
    return [
        AttentionConfig(spread, queries, warps, stages, split=split)
        for split, spread, (warps, stages) in itertools.product(SPLITS, (True, False), warps_stages)
    ]


def report(what: str, times: dict[AttentionConfig, float], kv_bytes: int) -> None:
    """One line per split size: the best cut of each form."""
    for split in sorted({config.split for config in times}):
        cells = []
        for spread in (True, False):
            found = {c: t for c, t in times.items() if c.split == split and c.spread == spread}
            if found:
                best = min(found, key=found.__getitem__)
                rate = kv_bytes / found[best] / 1e3
                cells.append(f"{label(best)} {found[best]:.1f} us, {rate:.0f} GB/s")
            else:
                cells.append("-")
        print(f"| {what} | {split} | {' | '.join(cells)} |", flush=True)


def launches(quick: bool) -> list[tuple[int | None, AttentionConfig]]:
    """Every launch this run will make, as window (None: ragged) and cut."""
    found = [
        (window, AttentionConfig(spread, queries, warps, 3, split=split))
        for split, (window, spread, queries, warps) in itertools.product(SPLITS, FORMS)
    ]
    found += [(window, config) for window in (1, 6) for config in decode_configs(window, quick)]
    for split, (queries, warps) in itertools.product((64, 256), PREFILL):
        found.append((None, AttentionConfig(False, queries, warps, 3, split=split)))
    return list(dict.fromkeys(found))


def compile_share(index: int, quick: bool) -> None:
    """Compile one share of all kernels into Triton's cache; run in its own process."""
    scene = Scene(1, 320)
    for window, config in launches(quick)[index::COMPILERS]:
        q, rows = scene.inputs(window or 64)
        with contextlib.suppress(OutOfResources):
            attention(q, SHAPE, rows, scene.layers[0], window=window, config=config)


def check_bits(context: int) -> None:
    """Decode, verify and prefill rows of the same positions, bit for bit, per split size."""
    scene = Scene(1, context)
    q, rows = scene.inputs(64)
    for split in SPLITS:
        results = []
        for window, spread, queries, warps in FORMS:
            config = AttentionConfig(spread, queries, warps, 3, split=split)
            results.append(attention(q, SHAPE, rows, scene.layers[0], window=window, config=config))
        differing = [
            form
            for form, out in zip(FORMS, results, strict=True)
            if not torch.equal(out, results[0])
        ]
        print(f"bits at context {context}, split {split}: {differing or 'all forms equal'}")


def time_decode(quick: bool) -> None:
    print("| case | split | spread | walk |\n|---|---|---|---|")
    for context, batch in itertools.product((530, 4096), (1, 8, 64)):
        scene = Scene(batch, context)
        kv_bytes = batch * context * SHAPE.kv_size * 2 * 2
        for window in (1, 4, 6):
            measured = {
                config: measure(scene, window, False, config, context)
                for config in decode_configs(window, quick)
            }
            times = {config: time for config, time in measured.items() if time is not None}
            report(f"context {context} batch {batch} window {window}", times, kv_bytes)
        for bound in (context, None):
            capacity = bound or TABLE_BLOCKS * BLOCK_SIZE
            config = choose(batch, SHAPE, 1, capacity, torch.bfloat16)
            time = measure(scene, 1, False, config, bound)
            print(f"default at window 1, room for {capacity}: {label(config)} {time:.1f} us")
        del scene
        torch.cuda.empty_cache()


def time_prefill() -> None:
    for length in (512, 2048):
        scene = Scene(1, length)
        flops = 2 * SHAPE.q_size * length * length
        for split, (queries, warps) in itertools.product((64, 256), PREFILL):
            config = AttentionConfig(False, queries, warps, 3, split=split)
            time = measure(scene, length, True, config, length)
            if time is not None:
                rate = flops / time / 1e6
                print(
                    f"prefill {length}: split {split} {label(config)} {time:.1f} us, "
                    f"{rate:.0f} TFLOP/s",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cut per form and split")
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

"""Time every launch configuration of attention on the GPU at hand, and compare their bits.

    python benchmarks/kernels/attention_gpu.py [--heads qwen3|qwen35|gemma4] [--cases 1x1,64x4,...]
        [--context N]

A case is batch x window. Times are of one layer, inside a CUDA graph over several layers' KV, so KV
comes from memory. Configurations are listed by form, queries, warps, stages and tile, "q" where the
queries are the left operand, the fastest first. ``!`` marks bits that differ from those of the
first one of the same tile. ``decode_gpu.py`` times those of Qwen3-8B in whole steps.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from graph_times import COMPILERS, compile_in_parallel, microseconds
from triton.runtime.errors import OutOfResources

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns
from sametoken.ops.model.attention.triton import AttentionConfig, attention, choose

HEADS = {
    "qwen3": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128),
    "qwen35": AttentionShape(num_heads=16, num_kv_heads=4, head_dim=256),
    "gemma4": AttentionShape(num_heads=32, num_kv_heads=4, head_dim=512),
}
#: By head size, warps, stages and tile where a program has few queries.
SMALL = {
    128: ((4, 3, 64), (4, 2, 64), (2, 2, 64), (2, 3, 64)),
    256: (
        (4, 3, 32), (4, 2, 32), (4, 4, 32), (8, 2, 32), (8, 3, 32), (2, 2, 32), (2, 3, 32),
        (4, 2, 64), (8, 2, 64), (8, 3, 64),
    ),
    512: ((8, 2, 32), (8, 3, 32), (4, 2, 32), (4, 2, 16), (4, 3, 16), (8, 2, 16)),
}  # fmt: skip
#: By head size, queries, warps, stages, tile, and whether KV is the left operand, for prefill.
LARGE = {
    128: (
        (32, 4, 3, 64, True), (32, 4, 2, 64, True), (64, 4, 2, 64, False), (64, 4, 3, 64, False),
        (64, 8, 2, 64, False), (64, 8, 3, 64, False), (128, 8, 2, 64, False),
    ),
    256: (
        (32, 4, 2, 32, True), (32, 4, 3, 32, True), (32, 8, 2, 32, True), (32, 8, 3, 32, True),
        (64, 8, 2, 32, False), (64, 8, 3, 32, False), (32, 4, 2, 64, True), (32, 8, 2, 64, True),
        (64, 8, 2, 64, False),
    ),
    512: (
        (32, 8, 2, 32, True), (32, 8, 3, 32, True), (64, 8, 2, 32, True), (64, 8, 2, 32, False),
        (32, 8, 2, 16, True), (32, 8, 3, 16, True),
    ),
}  # fmt: skip
#: Programs to spread splits over, beside the default.
PROGRAMS = (264, 1056)
#: From so many queries of a window on, configs are those of prefill.
MANY_QUERIES = 128

#: Batch and window of prefill.
PREFILL = ((1, 512), (4, 512))

BLOCK_SIZE, MAX_LEN = 64, 2048
ROTATED_BYTES = 300 << 20
MAX_LAYERS = 36
GIGABYTES_PER_SECOND = 4300

Case = tuple[int, int]


class Scene:
    """A batch of slots with equal contexts, over several layers of shuffled blocks."""

    def __init__(self, shape: AttentionShape, batch: int, context: int) -> None:
        self.shape, self.batch, self.context = shape, batch, context
        blocks_per_slot = -(-context // BLOCK_SIZE)
        num_blocks = batch * blocks_per_slot + 1
        layer = (2, num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        layer_bytes = 2 * torch.Size(layer).numel()
        num_layers = min(MAX_LAYERS, max(2, -(-ROTATED_BYTES // layer_bytes)))
        memory = torch.empty((num_layers, *layer), dtype=torch.bfloat16, device="cuda").normal_()
        self.layers = [LayerKV(part[0], part[1]) for part in memory]
        blocks = torch.randperm(num_blocks - 1, device="cuda").view(batch, blocks_per_slot)
        max_blocks = max(MAX_LEN // BLOCK_SIZE, blocks_per_slot)
        self.table = torch.zeros(batch, max_blocks, dtype=torch.int64, device="cuda")
        self.table[:, :blocks_per_slot] = blocks

    def attend(self, window: int, config: AttentionConfig) -> Callable[[LayerKV], torch.Tensor]:
        """Attention of the last ``window`` rows of every slot."""
        positions = torch.arange(self.context - window, self.context, device="cuda")
        slots = torch.arange(self.batch, device="cuda").repeat_interleave(window)
        runs = RowRuns.even(self.batch, window)
        rows = AttentionRows(positions.repeat(self.batch), slots, slots, self.table, runs)
        size = (len(slots), self.shape.num_heads, self.shape.head_dim)
        random = torch.Generator("cuda").manual_seed(0)
        q = torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=random)
        return lambda kv: attention(q, self.shape, rows, kv, config=config)


def configs(shape: AttentionShape, window: int) -> list[AttentionConfig]:
    """What is worth trying for windows of so many rows."""
    queries = window * shape.num_heads // shape.num_kv_heads
    if queries > MANY_QUERIES:
        return [
            AttentionConfig("sequential", block, warps, stages, tile=tile, kv_left=kv_left)
            for block, warps, stages, tile, kv_left in LARGE[shape.head_dim]
        ]
    sequential = [
        AttentionConfig("sequential", 16 if queries <= 16 else 32, warps, stages, tile=tile)
        for warps, stages, tile in SMALL[shape.head_dim]
    ]
    split_kv = [replace(config, form="split_kv") for config in sequential]
    return [*sequential, *split_kv, *(replace(split_kv[0], programs=count) for count in PROGRAMS)]


def name_of_config(config: AttentionConfig) -> str:
    usual = AttentionConfig(config.form, config.block_queries, config.num_warps, config.num_stages)
    tile = "" if config.tile == usual.tile else f"t{config.tile}"
    left = "" if config.kv_left else "q"
    programs = "" if config.programs == usual.programs else f"p{config.programs}"
    sizes = f"{config.block_queries}w{config.num_warps}s{config.num_stages}"
    return f"{config.form}{sizes}{tile}{left}{programs}"


def time_configs(shape: AttentionShape, cases: Iterable[Case], context: int) -> None:
    """One line per case: all configs alone, us a layer, the fastest first."""
    print("\nattention alone, us a layer; the floor is KV read once; ! other bits")
    for batch, window in cases:
        scene = Scene(shape, batch, max(context, window))
        expected: dict[int, torch.Tensor] = {}
        found = []
        for config in configs(shape, window):
            call = scene.attend(window, config)
            with contextlib.suppress(OutOfResources):
                out = call(scene.layers[0])
                wrong = "" if torch.equal(out, expected.setdefault(config.tile, out)) else "!"
                elapsed = microseconds(call, scene.layers, replays=10)
                found.append((elapsed, f"{name_of_config(config)} {elapsed:.1f}{wrong}"))
        kv_bytes = batch * scene.context * shape.kv_size * 2 * 2
        chosen = choose(batch, window, shape, MAX_LEN, torch.bfloat16)
        listed = ", ".join(text for _, text in sorted(found))
        print(
            f"{batch}x{window} at {scene.context}, floor "
            f"{kv_bytes / GIGABYTES_PER_SECOND / 1e3:.1f}, "
            f"chosen {name_of_config(chosen)}: {listed}",
            flush=True,
        )
        del scene
        torch.cuda.empty_cache()


def compile_configs(shape: AttentionShape, cases: Iterable[Case], share: int) -> None:
    """Compile one share of the configs into Triton's cache."""
    different = dict.fromkeys(config for _, window in cases for config in configs(shape, window))
    scene = Scene(shape, 1, BLOCK_SIZE)
    for config in list(different)[share::COMPILERS]:
        with contextlib.suppress(OutOfResources):
            scene.attend(2, config)(scene.layers[0])


def parsed_cases(text: str) -> list[Case]:
    """Batches and windows of "1x4,8x1"."""
    sizes = (case.split("x") for case in text.split(","))
    return [(int(batch), int(window)) for batch, window in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", choices=HEADS, default="qwen3")
    parser.add_argument("--cases", default="1x1,1x4,8x1,8x4,16x1,32x1,64x1,64x4,1x512,4x512")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    shape, cases = HEADS[options.heads], parsed_cases(options.cases)
    if options.compile is not None:
        compile_configs(shape, cases, options.compile)
        return
    begun = time.time()
    compile_in_parallel()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; compiled in {time.time() - begun:.0f} s")
    time_configs(shape, cases, options.context)


if __name__ == "__main__":
    main()

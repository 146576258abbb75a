"""Time latent attention (MLA) on the GPU at hand, beside what the chip can do.

    python benchmarks/kernels/latent_attention_gpu.py [--heads 16,20,128]
        [--cases 8x1x16384,64x1x2048,8x4x16384,1x2048x16384]

A case is batch x window x context. Times are of one layer, inside a CUDA graph over several layers'
vectors, so they come from memory. GB/s are of the vectors read once, TFLOP/s of the products of
visible positions; both stand beside what a copy and a square bf16 product of torch reach here.
Every configuration is listed by form, queries, warps, stages and "l" where vectors are the left
operand, the fastest first; ``*`` is the engine's choice, ``!`` marks other bits than the first's.

Then the products with W_UK and W_UV of GLM-4.7-Flash (20 heads) at the cases' row counts.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

import torch
from graph_times import microseconds
from triton.runtime.errors import OutOfResources

from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.model.latent_attention.heads_triton import head_products
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.model.latent_attention.triton import LatentConfig, attention, choose

RANK, ROPE = 512, 64
WIDTH = RANK + ROPE
BLOCK_SIZE = 64
#: Of all layers' vectors together, so that they do not stay in L2.
ROTATED_BYTES = 300 << 20
#: Queries, warps, stages, and whether vectors are the left operand; tiles of 64 positions.
FEW = ((16, 4, 2, True), (32, 4, 2, True), (32, 8, 2, True), (16, 4, 2, False), (64, 8, 2, False))
MANY = (
    (64, 8, 2, False),
    (64, 16, 2, False),
    (64, 8, 1, False),
    (64, 4, 2, False),
    (32, 8, 2, True),
    (32, 4, 2, True),
)
#: Row counts from which a launch has many queries.
MANY_ROWS = 64

Case = tuple[int, int, int]


class Scene:
    """A batch of slots with equal contexts, over several layers of shuffled blocks."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        per_slot = -(-context // BLOCK_SIZE)
        layer = (batch * per_slot + 1, BLOCK_SIZE, WIDTH)
        layers = max(2, -(-ROTATED_BYTES // (2 * torch.Size(layer).numel())))
        memory = torch.empty((layers, *layer), dtype=torch.bfloat16, device="cuda").normal_()
        self.layers = [LayerLatent(one, RANK) for one in memory]
        self.table = torch.randperm(batch * per_slot, device="cuda").view(batch, per_slot)

    def attend(
        self, window: int, heads: int, config: LatentConfig
    ) -> Callable[[LayerLatent], torch.Tensor]:
        """Attention of the last ``window`` rows of every slot."""
        positions = torch.arange(self.context - window, self.context, device="cuda")
        slots = torch.arange(self.batch, device="cuda").repeat_interleave(window)
        runs = RowRuns.even(self.batch, window)
        rows = AttentionRows(positions.repeat(self.batch), slots, slots, self.table, runs)
        random = torch.Generator("cuda").manual_seed(0)
        size = (len(slots), heads, WIDTH)
        q = torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=random)
        return lambda memory: attention(q, 0.07, rows, memory, config=config)


def limits() -> tuple[float, float]:
    """GB/s of a copy (read and written), and TFLOP/s of a bf16 product of 8192 x 8192."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = microseconds(target.copy_, [source])
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    multiplied = microseconds(lambda one: torch.mm(one, one), [square])
    return 2 * source.numel() / copied / 1e3, 2 * 8192**3 / multiplied / 1e6


def configs(rows: int, heads: int) -> list[LatentConfig]:
    """What is worth trying for a launch of so many rows."""
    sizes = MANY if rows >= MANY_ROWS else FEW
    forms = ("sequential",) if rows >= MANY_ROWS else ("split_kv", "sequential")
    return [
        LatentConfig(form, queries, 64, num_warps=warps, num_stages=stages, kv_left=left)
        for form in forms
        for queries, warps, stages, left in sizes
        if queries >= min(heads, 64)
    ]


def name_of(config: LatentConfig) -> str:
    left = "l" if config.kv_left else ""
    return f"{config.form}{config.block_queries}w{config.num_warps}s{config.num_stages}{left}"


def time_case(case: Case, heads: int) -> None:
    """One line: the fastest configuration against the limits, and all of them in us a layer."""
    batch, window, context = case
    scene, first, found = Scene(batch, context), None, []
    chosen = choose(batch, window, heads, context, torch.bfloat16)
    for config in dict.fromkeys((chosen, *configs(batch * window, heads))):
        call = scene.attend(window, heads, config)
        with contextlib.suppress(OutOfResources):
            out = call(scene.layers[0])
            first = out if first is None else first
            wrong = "" if torch.equal(out, first) else "!"
            elapsed = microseconds(call, scene.layers)
            mark = "*" if config == chosen else ""
            found.append((elapsed, f"{name_of(config)}{mark}{wrong} {elapsed:.1f}"))
    visible = batch * window * (context - (window - 1) / 2)
    flops, read = 2 * heads * visible * (WIDTH + RANK), 2 * batch * context * WIDTH
    best = min(found)[0]
    listed = ", ".join(text for _, text in sorted(found))
    print(
        f"{heads} heads, {batch}x{window} at {context}: {read / best / 1e3:.0f} GB/s, "
        f"{flops / best / 1e6:.0f} TFLOP/s; {listed}",
        flush=True,
    )


def time_products(rows: int) -> None:
    """us of both per-head products of a layer."""
    times = []
    for features, depth in ((RANK, 192), (256, RANK)):
        x = torch.randn(rows, 20, depth, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(rows, 20, features, dtype=torch.bfloat16, device="cuda")
        count = max(2, ROTATED_BYTES // (2 * 20 * features * depth))
        size = (count, 20, features, depth)
        matrices = list(torch.randn(size, dtype=torch.bfloat16, device="cuda"))
        times.append(microseconds(lambda one, x=x, out=out: head_products(x, one, out), matrices))
    print(f"products of {rows} rows: W_UK {times[0]:.1f} us, W_UV {times[1]:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default="16,20,128")
    parser.add_argument("--cases", default="8x1x16384,64x1x2048,8x4x16384,1x2048x16384")
    options = parser.parse_args()
    bandwidth, rate = limits()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth:.0f} GB/s, product {rate:.0f} TFLOP/s")
    cases = [tuple(int(size) for size in case.split("x")) for case in options.cases.split(",")]
    for heads in (int(count) for count in options.heads.split(",")):
        for batch, window, context in cases:
            time_case((batch, window, context), heads)
            torch.cuda.empty_cache()
    for rows in sorted({batch * window for batch, window, _ in cases}):
        time_products(rows)


if __name__ == "__main__":
    main()

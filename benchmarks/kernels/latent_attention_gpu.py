"""Time latent attention (MLA) on the GPU at hand, beside what the chip can do.

    python benchmarks/kernels/latent_attention_gpu.py [--heads 16,20,128] [--kernels triton,gluon]
        [--cases 8x1x16384,8x1x16400,64x1x2060,256x1x1100,32x1x8200,8x4x16384,1x512x4096,...]
        [--float8]

A case is batch x window x context. Powers of two divide evenly among programs and flatter: some
contexts are as long as a request's after some tokens. Times are of one layer of a dozen or more, in
a CUDA graph, as a layer's first vectors come while the one before it ends. Each layer has its own
vectors, so they come from memory. GB/s are of the vectors read once, TFLOP/s
of the products of visible positions; both stand beside what a copy and a square bf16 product of
torch reach here.
Every configuration is listed by form, queries, warps, stages and "l" where vectors are the left
operand, or of the Gluon kernels by form, programs and queries, the fastest first.
``*`` is the choice of its kernels, ``!`` marks other bits than the first of its kernels has.

Then the products with W_UK and W_UV of GLM-4.7-Flash (20 heads) at the cases' row counts.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

import torch
from graph_times import microseconds
from triton import next_power_of_2
from triton.runtime.errors import OutOfResources

from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.hopper import is_hopper
from sametoken.ops.model.latent_attention import hopper, triton
from sametoken.ops.model.latent_attention.heads_triton import head_products
from sametoken.ops.model.latent_attention.hopper import LatentHopperConfig
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.model.latent_attention.tuning import LatentConfig

RANK, ROPE = 512, 64
WIDTH = RANK + ROPE
BLOCK_SIZE = 64
#: The fewest layers, and the fewest bytes of their vectors, so that they do not stay in L2.
MIN_LAYERS = 12
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

#: Most rows of a launch of splits: beyond, their results take gigabytes.
MAX_ROWS = 512

#: Queries and programs of the Gluon kernels' launches of splits, and whether programs join them.
HOPPER = (
    (16, 128, False), (16, 132, False), (16, 128, True), (16, 132, True),
    (32, 128, False), (32, 132, False), (64, 128, False), (64, 132, False),
)  # fmt: skip

Case = tuple[int, int, int]
Config = LatentConfig | LatentHopperConfig


class Scene:
    """A batch of slots with equal contexts, over several layers of shuffled blocks."""

    def __init__(self, batch: int, context: int, dtype: torch.dtype) -> None:
        self.batch, self.context = batch, context
        per_slot = -(-context // BLOCK_SIZE)
        layer = (batch * per_slot + 1, BLOCK_SIZE, WIDTH)
        layers = max(MIN_LAYERS, -(-ROTATED_BYTES // (dtype.itemsize * torch.Size(layer).numel())))
        memory = torch.empty((layers, *layer), dtype=torch.bfloat16, device="cuda").normal_()
        memory = memory.to(dtype)
        self.layers = [LayerLatent(one, RANK) for one in memory]
        self.table = torch.randperm(batch * per_slot, device="cuda").view(batch, per_slot)

    def attend(
        self, window: int, heads: int, config: Config
    ) -> Callable[[LayerLatent], torch.Tensor]:
        """Attention of the last ``window`` rows of every slot."""
        positions = torch.arange(self.context - window, self.context, device="cuda")
        slots = torch.arange(self.batch, device="cuda").repeat_interleave(window)
        runs = RowRuns.even(self.batch, window)
        rows = AttentionRows(positions.repeat(self.batch), slots, slots, self.table, runs)
        random = torch.Generator("cuda").manual_seed(0)
        size = (len(slots), heads, WIDTH)
        q = torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=random)
        if isinstance(config, LatentHopperConfig):
            return lambda memory: hopper.attention(q, 0.07, rows, memory, config=config)
        return lambda memory: triton.attention(q, 0.07, rows, memory, config=config)


def limits() -> tuple[float, float]:
    """GB/s of a copy (read and written), and TFLOP/s of a bf16 product of 8192 x 8192."""
    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: in a graph, a copy is the copy engine's.
    copied = microseconds(lambda one: torch.bitwise_not(one, out=target), [source])
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    multiplied = microseconds(lambda one: torch.mm(one, one), [square])
    return 2 * source.nbytes / copied / 1e3, 2 * 8192**3 / multiplied / 1e6


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


def hopper_configs(rows: int, heads: int) -> list[LatentHopperConfig]:
    """What is worth trying of the Gluon kernels, on a chip that has them."""
    if not is_hopper(torch.device("cuda")):
        return []
    least = min(next_power_of_2(heads), 64)
    found = [LatentHopperConfig(*sizes) for sizes in HOPPER
             if sizes[0] >= least and rows <= MAX_ROWS]  # fmt: skip
    return [*found, hopper.WHOLE_ROWS]


def name_of(config: Config) -> str:
    if isinstance(config, LatentHopperConfig):
        form = f"splits{config.programs}" if config.programs else "rows"
        form += "_joined" if config.joins else ""
        return f"gluon_{form}_q{config.queries}"
    left = "l" if config.kv_left else ""
    return f"{config.form}{config.block_queries}w{config.num_warps}s{config.num_stages}{left}"


def time_case(case: Case, heads: int, kernels: set[str], dtype: torch.dtype) -> None:
    """One line: the fastest configuration against the limits, and all of them in us a layer."""
    batch, window, context = case
    scene, found = Scene(batch, context, dtype), []
    rows = batch * window
    families: list[tuple[Config, list[Config]]] = []
    if "triton" in kernels:
        best_triton = triton.choose(batch, window, heads, context, torch.bfloat16)
        families.append((best_triton, [*configs(rows, heads)]))
    if "gluon" in kernels and (gluon := hopper_configs(rows, heads)):
        families.append((hopper.choose(batch, window, rows, heads, context), [*gluon]))
    for chosen, others in families:
        first = None
        for config in dict.fromkeys((chosen, *others)):
            call = scene.attend(window, heads, config)
            with contextlib.suppress(OutOfResources):
                out = call(scene.layers[0])
                first = out if first is None else first
                wrong = "" if torch.equal(out, first) else "!"
                elapsed = microseconds(call, scene.layers)
                mark = "*" if config == chosen else ""
                found.append((elapsed, f"{name_of(config)}{mark}{wrong} {elapsed:.1f}"))
    visible = rows * (context - (window - 1) / 2)
    flops, read = 2 * heads * visible * (WIDTH + RANK), dtype.itemsize * batch * context * WIDTH
    best = min(found, default=(float("nan"),))[0]
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
    parser.add_argument("--kernels", default="triton,gluon")
    cases = "8x1x16384,8x1x16400,64x1x2060,256x1x1100,32x1x8200,8x4x16384,1x512x4096,1x2048x16384"
    parser.add_argument("--cases", default=cases)
    parser.add_argument("--float8", action="store_true", help="vectors in float8")
    options = parser.parse_args()
    kernels = set(options.kernels.split(","))
    bandwidth, rate = limits()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth:.0f} GB/s, product {rate:.0f} TFLOP/s")
    cases = [tuple(int(size) for size in case.split("x")) for case in options.cases.split(",")]
    for heads in (int(count) for count in options.heads.split(",")):
        for batch, window, context in cases:
            dtype = torch.float8_e4m3fn if options.float8 else torch.bfloat16
            time_case((batch, window, context), heads, kernels, dtype)
            torch.cuda.empty_cache()
    for rows in sorted({batch * window for batch, window, _ in cases}):
        time_products(rows)


if __name__ == "__main__":
    main()

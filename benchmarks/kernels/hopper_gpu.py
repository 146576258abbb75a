"""Time attention on Hopper by launch form, beside the Triton form, and compare bits.

    python benchmarks/kernels/hopper_gpu.py [--heads 64|128|256] [--window POSITIONS] [--sinks]
        [--float8] [--sustained]

Times are of one layer, inside a CUDA graph over several layers' KV, so KV comes from memory.
With ``--float8`` KV is e4m3. Beside them: the time to read KV once at 4.2 TB/s, and that of the
products at 650 TFLOP/s. ``!`` marks bits that differ from those of the first form. With
``--sustained`` each form runs for a second, and watts stand beside its time.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from graph_times import microseconds, sustained

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns
from sametoken.ops.model.attention import hopper, triton

SHAPES = {
    "64": AttentionShape(64, 8, 64),
    "128": AttentionShape(32, 8, 128),
    "256": AttentionShape(16, 4, 256),
}
BLOCK_SIZE = 64
ROTATED_BYTES = 300 << 20
#: KV comes from one block, as an engine's: some allocations of its own size are 14 % slower.
BLOCK_BYTES = 16 << 30
MAX_LAYERS = 24
TERABYTES_PER_SECOND, TERAFLOPS = 4.2, 650


@dataclass(frozen=True)
class Case:
    """Requests whose last rows attend: the length of each, and its number of rows.

    Attributes:
        padding: runs without rows behind them, as in padded steps.
    """

    name: str
    lengths: Sequence[int]
    widths: Sequence[int]
    padding: int = 0


def cases() -> list[Case]:
    random.seed(1)

    def drawn(n: int, least: int, most: int) -> list[int]:
        return [random.randint(least, most) for _ in range(n)]

    even = [
        (1, 1, 640), (8, 1, 640), (64, 1, 640), (256, 1, 640), (8, 4, 640), (64, 4, 640),
        (64, 1, 2048), (32, 1, 8192), (8, 1, 16384), (8, 4, 16384), (1, 1, 16384),
        # Longer by some tokens, as requests are: no number of programs divides these.
        (64, 1, 2060), (32, 1, 8200), (8, 1, 16400), (8, 4, 16404), (1, 1, 16400),
        (1, 512, 512), (7, 512, 512), (1, 2048, 2048), (1, 4096, 4096), (1, 100, 16384),
        (1, 512, 16384), (1, 2048, 16384),
    ]  # fmt: skip
    return [
        *(Case(f"{n} x {rows} at {size}", [size] * n, [rows] * n) for n, rows, size in even),
        Case("1 at 16384 among 63 at 640", [16384] + [640] * 63, [1] * 64),
        Case("64 at 100 to 4000", drawn(64, 100, 4000), [1] * 64),
        Case("64 at 400 to 900", drawn(64, 400, 900), [1] * 64),
        Case("256 at 100 to 1000", crowd := drawn(256, 100, 1000), [1] * 256),
        Case("256 x 4 at 100 to 1000", crowd, [4] * 256),
        Case("1024 at 60 to 110", drawn(1024, 60, 110), [1] * 1024),
        Case("prompts of 300 to 4000", [300, 700, 2000, 900, 4000], [300, 700, 100, 900, 348]),
        Case("7 x 512 at 512 in 16 runs", [512] * 7, [512] * 7, 9),
        Case("1 x 2048 at 16384 in 8 runs", [16384], [2048], 7),
        Case("1 x 4096 at 16384 in 8 runs", [16384], [4096], 7),
    ]


class Scene:
    """A case's rows over several layers of shuffled blocks."""

    def __init__(self, shape: AttentionShape, case: Case, dtype: torch.dtype) -> None:
        ends = list(zip(case.lengths, case.widths, strict=True))
        window = shape.sliding_window or max(case.lengths)
        self.kv_bytes = (
            sum(min(n, window + w) for n, w in ends) * shape.kv_size * 2 * dtype.itemsize
        )
        counts = [-(-length // BLOCK_SIZE) for length in case.lengths]
        layer = (2, sum(counts), shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        own_bytes = sum(case.lengths) * shape.kv_size * 2 * dtype.itemsize
        num_layers = min(MAX_LAYERS, max(2, -(-ROTATED_BYTES // own_bytes)))
        memory = torch.empty((num_layers, *layer), dtype=dtype, device="cuda")
        for part in memory:
            part.copy_(torch.randn(layer, device="cuda"))
        self.layers = [LayerKV(part[0], part[1]) for part in memory]
        # Behind a slot's last block are those of requests that had the slot before.
        table = torch.randint(sum(counts), (len(counts), max(counts) + 1), device="cuda")
        blocks = torch.randperm(sum(counts), device="cuda").split(counts)
        for slot, mine in enumerate(blocks):
            table[slot, : len(mine)] = mine
        where = [(slot, at) for slot, (n, w) in enumerate(ends) for at in range(n - w, n)]
        slots, positions = torch.tensor(where, device="cuda").T.contiguous()
        self.flops = 4 * shape.q_size * int((positions + 1).clamp(max=window).sum())
        widths = [*case.widths, *[0] * case.padding]
        starts = torch.tensor([0, *widths], device="cuda").cumsum(0)
        count, most = len(widths), max(widths)
        runs = RowRuns(count, most, None if len({*widths}) == 1 else starts, count, most)
        self.rows = AttentionRows(positions, slots, slots, table, runs)
        size = (len(where), shape.num_heads, shape.head_dim)
        self.q = torch.randn(size, dtype=torch.bfloat16, device="cuda")


def forms_of(shape: AttentionShape, case: Case) -> dict[str, hopper.HopperConfig | None]:
    """Launch forms by name, of columns where a run has few queries, and those that have room."""
    table, rows = hopper.table_for(shape), hopper.QUERIES * shape.num_kv_heads // shape.num_heads
    num_tiles = (len(case.widths) + case.padding) * -(-max(case.widths) // rows)
    columns: dict[str, hopper.HopperConfig | None] = {}
    if size := hopper.columns_of(max(case.widths) * shape.num_heads // shape.num_kv_heads):
        columns["few columns"] = replace(table.few_columns, columns=size)
        columns["columns"] = replace(table.columns, columns=size)
    splits = {"few": table.few, "splits": table.splits} if num_tiles <= hopper.MAX_TILES else {}
    return {"chosen": None, **columns, **splits, "narrow": table.narrow, "wide": table.wide}


def time_case(
    shape: AttentionShape,
    case: Case,
    arrived: torch.Tensor,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    is_sustained: bool,
) -> None:
    """One line: every form's time."""
    scene, expected, times = Scene(shape, case, dtype), None, []
    for name, config in forms_of(shape, case).items():

        def attend(kv: LayerKV, config: hopper.HopperConfig | None = config) -> torch.Tensor:
            return hopper.attention(scene.q, shape, scene.rows, kv, arrived, sinks, config=config)

        out = attend(scene.layers[0])
        expected = out if expected is None else expected
        wrong = "" if torch.equal(out, expected) else "!"
        if is_sustained:
            found = sustained(attend, scene.layers)
            times.append(f"{name} {found.microseconds:.1f}{wrong} at {found.watts:.0f} W")
        else:
            times.append(f"{name} {microseconds(attend, scene.layers):.1f}{wrong}")
    other = microseconds(
        lambda kv: triton.attention(scene.q, shape, scene.rows, kv, sinks), scene.layers
    )
    reads = scene.kv_bytes / TERABYTES_PER_SECOND / 1e6
    products = scene.flops / TERAFLOPS / 1e6
    listed = "; ".join(times)
    print(
        f"{case.name}: read {reads:.1f}, products {products:.1f}: {listed}; Triton {other:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", choices=SHAPES, default="128")
    parser.add_argument("--window", type=int, metavar="POSITIONS")
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--sustained", action="store_true")
    arguments = parser.parse_args()
    shape = replace(SHAPES[arguments.heads], sliding_window=arguments.window)
    sinks = torch.randn(shape.num_heads, device="cuda") if arguments.sinks else None
    print(torch.cuda.get_device_name(), torch.__version__)
    arrived = hopper.counters(torch.device("cuda"))
    torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    dtype = torch.float8_e4m3fn if arguments.float8 else torch.bfloat16
    for case in cases():
        time_case(shape, case, arrived, sinks, dtype, is_sustained=arguments.sustained)
    assert not arrived.any()


if __name__ == "__main__":
    main()

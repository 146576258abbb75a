"""Time logits with eight-bit weights on the GPU at hand, next to bf16 at its tuned choice.

    python benchmarks/eight_bit_gpu.py [--rows 1,4,8,32,64] [--only 248320x4096]

Weights come from memory: a CUDA graph walks over copies worth several times the L2. A
candidate whose rows differ from the first one's in one bit is shown with ``!``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from gemm_gpu import COMPILERS, MAX_LAUNCHES, ROTATED_BYTES, normal
from graph_times import microseconds
from triton.runtime.errors import OutOfResources

from sametoken.kernels.gemm.eight_bit import quantize
from sametoken.kernels.gemm.eight_bit_triton import Tiles, default_tiles, logits
from sametoken.kernels.gemm.triton import product
from sametoken.kernels.gemm.tuning import GemmShape, load_table

SHAPES = [
    GemmShape(248320, 4096, "logits"),
    GemmShape(151936, 4096, "logits"),
    GemmShape(32000, 4096, "logits"),
    GemmShape(8192, 576, "logits"),
]
ROWS = (1, 4, 8, 32, 64)
HEADER = "| weight | rows | best | us | TB/s | bf16 us | all us |\n|---|---|---|---|---|---|---|"


def label(tiles: Tiles) -> str:
    shape = f"{tiles.block_rows}x{tiles.block_features}x{tiles.block_depth}"
    return f"{shape}w{tiles.num_warps}s{tiles.num_stages}"


def candidates(shape: GemmShape, rows: int) -> list[Tiles]:
    """The default first."""
    found = [default_tiles(shape.out_features, rows)]
    for block_rows in (16,) if rows <= 16 else (32,) if rows <= 32 else (32, 64):
        found += [
            Tiles(block_rows, 128, 128, 4, 3),
            Tiles(block_rows, 128, 128, 4, 4),
            Tiles(block_rows, 128, 128, 4, 5),
            Tiles(block_rows, 64, 128, 4, 4),
            Tiles(block_rows, 64, 128, 4, 6),
            Tiles(block_rows, 128, 128, 8, 4),
        ]
    return list(dict.fromkeys(found))


def compile_share(index: int, shapes: list[GemmShape], rows: list[int]) -> None:
    """Compile one share of all kernels into Triton's cache; run in its own process."""
    table = load_table(torch.cuda.get_device_name())
    jobs: dict[tuple, Callable[[], object]] = {}
    for shape in shapes:
        x, matrix = normal(1, shape.in_features), normal(512, shape.in_features)
        weight = quantize(matrix)
        for count in rows:
            for tiles in candidates(shape, count):
                jobs[tiles, shape.in_features] = lambda x=x, w=weight, t=tiles: logits(x, w, t)
            config = table.choose(shape, count)
            jobs[config, shape.in_features] = lambda x=x, m=matrix, c=config: product(
                c, x, m, "logits"
            )
    for job in list(jobs.values())[index::COMPILERS]:
        try:
            job()
        except OutOfResources:
            continue


def copies(num_bytes: int) -> int:
    return min(MAX_LAUNCHES, max(2, -(-ROTATED_BYTES // num_bytes)))


def measure(shape: GemmShape, row_counts: list[int]) -> None:
    scale, num_elements = shape.in_features**-0.5, shape.out_features * shape.in_features
    matrices = [
        normal(shape.out_features, shape.in_features, scale=scale)
        for _ in range(copies(2 * num_elements))
    ]
    weights = [quantize(matrices[0]) for _ in range(copies(num_elements))]
    table = load_table(torch.cuda.get_device_name())
    x = normal(max(row_counts), shape.in_features)
    expected = logits(x, weights[0])
    for rows in row_counts:
        part, times, notes = x[:rows], {}, []
        for tiles in candidates(shape, rows):
            try:
                out = logits(part, weights[0], tiles)
                times[tiles] = microseconds(
                    lambda weight, t=tiles: logits(part, weight, t),  # noqa: B023
                    weights,
                )
            except OutOfResources:
                notes.append(f"{label(tiles)} does not fit")
                continue
            mark = "" if torch.equal(out, expected[:rows]) else "!"
            notes.append(f"{label(tiles)} {times[tiles]:.1f}{mark}")
        config = table.choose(shape, rows)
        bf16 = microseconds(
            lambda matrix, c=config: product(c, part, matrix, "logits"),  # noqa: B023
            matrices,
        )
        best = min(times, key=times.__getitem__)
        print(
            f"| {shape.out_features}x{shape.in_features} | {rows} | {label(best)} "
            f"| {times[best]:.1f} | {weights[0].nbytes / times[best] / 1e6:.2f} | {bf16:.1f} "
            f"| {', '.join(notes)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="row counts, with commas")
    parser.add_argument("--only", default="", help="weights, with commas; default: all")
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    named = {f"{shape.out_features}x{shape.in_features}": shape for shape in SHAPES}
    shapes = [named[name] for name in options.only.split(",")] if options.only else SHAPES
    if options.compile is not None:
        compile_share(options.compile, shapes, rows)
        return
    begun = time.time()
    command = [sys.executable, *sys.argv, "--compile"]
    workers = [subprocess.Popen([*command, str(index)]) for index in range(COMPILERS)]
    for worker in workers:
        worker.wait()
    print(f"{torch.cuda.get_device_name()}; compiled in {time.time() - begun:.0f} s")
    print(HEADER)
    for shape in shapes:
        measure(shape, rows)
    print(f"done after {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()

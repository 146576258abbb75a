"""Time products in fp8 on this GPU, beside bf16 at its tuned choice.

    python benchmarks/kernels/fp8_gpu.py [--rows 1,4,8,32,64,256] [--only 4096x12288,248320x4096]
        [--blocks]

Times include the quantization of the activations, which is also shown alone. Weights are read
from memory: a CUDA graph runs over copies that exceed L2 several times. A line has the fastest
kernels first, and the default marked ``*``; a kernel whose rows differ from the first one's in one
bit is marked ``!``. With ``--blocks`` weights have a scale per 128 x 128 elements, and activations
one per 128; "chosen" is then what an engine takes. Labels: rows x features x depth of a tile, w
warps, s stages, t loads by tensor descriptors, o bytes of a weight's row prefetched; of streamed
weights b boxes and g warp groups.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from gemm_gpu import copies, label, normal, streamed
from graph_times import COMPILERS, compile_in_parallel, microseconds
from triton.runtime.errors import OutOfResources

from sametoken.ops.model.gemm.fp8 import Fp8Weight, quantize
from sametoken.ops.model.gemm.fp8_triton import DEPTH, NARROW, default_config, product, rounded
from sametoken.ops.model.gemm.product import product as bf16_product
from sametoken.ops.model.gemm.tuning import (
    GemmShape,
    StreamedConfig,
    TritonConfig,
    streamed_config,
)
from sametoken.ops.triton import device_table
from sametoken.ops.weight import Rounding

Float8Config = TritonConfig | StreamedConfig

#: Weights of the heads of Qwen3-8B (EAGLE-3) and Qwen3.5-9B (MTP), with their lm_head; the last are
#: others of Qwen3-8B, and those of Qwen3.5-35B-A3B.
SHAPES = [
    GemmShape(4096, 4096),
    GemmShape(4096, 8192),
    GemmShape(4096, 12288),
    GemmShape(6144, 8192),
    GemmShape(10240, 4096),
    GemmShape(24576, 4096, "silu_mul"),
    GemmShape(32000, 4096, "logits"),
    GemmShape(151936, 4096, "logits"),
    GemmShape(248320, 4096, "logits"),
    GemmShape(6144, 4096),
    GemmShape(12288, 2048),
    GemmShape(2048, 4096),
    GemmShape(1024, 2048, "silu_mul"),
    GemmShape(2048, 512),
]
ROWS = (1, 4, 8, 32, 64, 256)
SHOWN = 5


def tiles(
    block_rows: int, features: int, warps: int, stages: int, depth: int = DEPTH, **more
) -> TritonConfig:
    config = TritonConfig(block_rows, features, depth, warps, stages, pdl=True, **more)
    return config if "prefetch_bytes" in more else replace(config, prefetch_bytes=0)


def candidates(shape: GemmShape, rows: int) -> list[Float8Config]:
    """List the candidates for scales of rows, the default first."""
    default, on_hopper = default_config(shape, rows, pdl=True), streamed(shape, rows)
    first = streamed_config(shape, rows, 1) if on_hopper else None
    size = default.block_rows
    if rows > 64:
        found = many_rows(shape)
    elif shape.epilogue == "silu_mul":
        found = gated(size)
    elif shape.out_features < NARROW:
        found = [*narrow(size), *(narrow(2 * size) if rows > size else ())]
    else:
        found = wide(size)
    return list(dict.fromkeys([first or default, default, *found, *on_hopper]))


def candidates_of_blocks(shape: GemmShape, rows: int) -> list[Float8Config | None]:
    """As ``candidates``, for scales of blocks; None is what an engine takes."""
    in_parts = [
        config
        for config in candidates(shape, rows)
        if isinstance(config, StreamedConfig) or config.block_depth == DEPTH
    ]
    width = 32 if shape.epilogue == "silu_mul" else 64
    tiles = (StreamedConfig(block_rows, width, boxes=2) for block_rows in (32, 64))
    return list(dict.fromkeys([None, *in_parts, *(tiles if rows > 32 else ())]))


def candidates_of(weight: Fp8Weight, shape: GemmShape, rows: int) -> Sequence[Float8Config | None]:
    """The candidates of a weight's scales."""
    return (candidates_of_blocks if weight.blocks else candidates)(shape, rows)


def narrow(size: int) -> list[TritonConfig]:
    """List configs for few programs with deep pipelines; the deepest need more than 99 KiB."""
    stages = {16: (6, 9, 14, 20), 32: (6, 8, 12, 16), 64: (4, 6, 9, 12)}[size]
    return [
        *(tiles(size, 64, 4, depth) for depth in stages),
        *(tiles(size, 64, 4, stages[1], prefetch_bytes=early) for early in (1024, 4096, 8192)),
        tiles(size, 64, 4, stages[2], prefetch_bytes=1024),
        tiles(size, 64, 4, stages[2], prefetch_bytes=4096),
        *(tiles(size, 64, 4, depth, tma=True) for depth in stages[1:3]),
        tiles(size, 64, 8, stages[1]),
        *(tiles(size, 64, 4, depth // 2, 2 * DEPTH, prefetch_bytes=1024) for depth in stages[1:]),
        tiles(size, 64, 4, stages[3] // 4, 4 * DEPTH, tma=True),
    ]


def gated(size: int) -> list[TritonConfig]:
    """List configs of gated products; an iteration reads equal numbers of up and gate rows."""
    return [
        *(tiles(size, 64, 4, depth) for depth in (3, 4, 5, 8)),
        *(tiles(size, 64, 4, 4, prefetch_bytes=early) for early in (1024, 4096)),
        *(tiles(size, 64, 4, depth, tma=True) for depth in (3, 4, 6)),
        *(tiles(size, 64, 4, depth) for depth in (6, 7)),
        tiles(size, 128, 8, 3),
        tiles(size, 128, 8, 3, tma=True),
    ]


def wide(size: int) -> list[TritonConfig]:
    return [
        *(tiles(size, 128, 4, depth) for depth in (3, 4, 5)),
        *(tiles(size, 64, 4, depth) for depth in (4, 6, 8)),
        *(tiles(size, 128, 4, 4, prefetch_bytes=early) for early in (1024, 4096)),
        tiles(size, 128, 8, 4),
        tiles(size, 128, 4, 4, tma=True),
        tiles(size, 64, 4, 6, tma=True),
    ]


def many_rows(shape: GemmShape) -> list[TritonConfig]:
    if shape.epilogue == "silu_mul":
        return [
            *(tiles(128, 64, 8, depth, tma=tma) for depth in (3, 4) for tma in (False, True)),
            *(tiles(64, 64, 4, depth, tma=tma) for depth in (3, 4) for tma in (False, True)),
            tiles(64, 128, 8, 3, tma=True),
            tiles(256, 64, 8, 3, tma=True),
            *(tiles(128, 128, 8, depth, tma=True) for depth in (3, 4)),
        ]
    found = [tiles(128, 64, 4, depth, tma=tma) for depth in (4, 6) for tma in (False, True)]
    found += [tiles(128, 128, 8, depth, tma=True) for depth in (3, 4, 7)]
    found += [tiles(128, 256, 8, 4, tma=True)]
    if shape.out_features < NARROW:
        return [*found, tiles(64, 64, 4, 6), tiles(64, 64, 4, 8, tma=True), tiles(64, 128, 4, 4)]
    found += [tiles(64, 128, 8, 4)]
    found += [tiles(128, 128, 8, 4)]
    return [*found, tiles(256, 64, 8, 3), tiles(256, 64, 8, 4, tma=True), tiles(64, 256, 8, 3)]


def weight_of(matrix: torch.Tensor, *, blocks: bool) -> Fp8Weight:
    """A weight with a scale a row, or one per block."""
    if not blocks:
        return Fp8Weight(*quantize(matrix))
    scale = torch.ones(len(matrix), -(-matrix.shape[1] // DEPTH), device=matrix.device)
    return Fp8Weight(matrix.to(torch.float8_e4m3fn), scale, Rounding(grouped=True), blocks=True)


def compile_share(index: int, shapes: list[GemmShape], rows: list[int], *, blocks: bool) -> None:
    """Compile one share of all kernels into Triton's cache, in a separate process."""
    table = device_table()
    jobs: dict[tuple, Callable[[], object]] = {}
    for shape in shapes:
        epilogue = shape.epilogue
        x, matrix = normal(1, shape.in_features), normal(1024, shape.in_features)
        weight = weight_of(matrix, blocks=blocks)
        for count in rows:
            for config in candidates_of(weight, shape, count):
                jobs[config, epilogue, "e4m3"] = lambda x=x, w=weight, e=epilogue, c=config: (
                    product(x, w, e, None, c)
                )
            config = table.choose(shape, count)
            jobs[config, epilogue, "bf16"] = lambda x=x, m=matrix, e=epilogue, c=config: (
                bf16_product(c, x, m, e)
            )
    for job in list(jobs.values())[index::COMPILERS]:
        try:
            job()
        except OutOfResources:
            continue


def measure(shape: GemmShape, row_counts: list[int], *, blocks: bool) -> None:
    """Print one line per number of rows."""
    scale, num_elements = shape.in_features**-0.5, shape.out_features * shape.in_features
    matrices = [
        normal(shape.out_features, shape.in_features, scale=scale)
        for _ in range(copies(2 * num_elements))
    ]
    weight = weight_of(matrices[0], blocks=blocks)
    weights = [replace(weight, matrix=weight.matrix.clone()) for _ in range(copies(num_elements))]
    table = device_table()
    x = normal(max(row_counts), shape.in_features)
    for rows in row_counts:
        part = x[:rows]
        config = table.choose(shape, rows)
        bf16 = microseconds(
            lambda matrix, c=config: bf16_product(c, part, matrix, shape.epilogue),  # noqa: B023
            matrices,
        )
        alone = microseconds(lambda one: rounded(part, one.rounding), weights)  # noqa: B023
        found = timed(shape, part, weights, product(x, weight, shape.epilogue)[:rows])
        name = f"{shape.out_features}x{shape.in_features} {shape.epilogue} {rows:3}"
        rate = weight.nbytes / found[0][0] / 1e6
        print(name, f"{rate:.2f} TB/s, bf16 {bf16:.1f} us, rounding {alone:.1f}:", end=" ")
        print(", ".join(f"{note} {us:.1f}" for us, note in found), flush=True)


def timed(
    shape: GemmShape, x: torch.Tensor, weights: list[Fp8Weight], expected: torch.Tensor
) -> list[tuple[float, str]]:
    """Return microseconds and labels of the fastest, default and wrong candidates."""
    times: list[tuple[float, str]] = []
    for index, config in enumerate(candidates_of(weights[0], shape, x.shape[0])):

        def run(weight: Fp8Weight, config: Float8Config | None = config) -> torch.Tensor:
            return product(x, weight, shape.epilogue, None, config)

        try:
            wrong = not torch.equal(run(weights[0]), expected)
            us = microseconds(run, weights)
        except OutOfResources:
            continue
        name = "chosen" if config is None else label(config)
        times.append((us, f"{name}{'' if index else '*'}{'!' if wrong else ''}"))
    times.sort()
    return times[:SHOWN] + [one for one in times[SHOWN:] if one[1][-1] in "*!"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", default=",".join(map(str, ROWS)), help="comma-separated row counts"
    )
    parser.add_argument("--only", default="", help="comma-separated weights; default: all")
    parser.add_argument("--blocks", action="store_true", help="scales of blocks")
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    named = {f"{shape.out_features}x{shape.in_features}": shape for shape in SHAPES}
    shapes = [named[name] for name in options.only.split(",")] if options.only else SHAPES
    if options.compile is not None:
        compile_share(options.compile, shapes, rows, blocks=options.blocks)
        return
    begun = time.time()
    compile_in_parallel()
    print(f"{torch.cuda.get_device_name()}; compiled in {time.time() - begun:.0f} s")
    for shape in shapes:
        measure(shape, rows, blocks=options.blocks)
    print(f"done after {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()

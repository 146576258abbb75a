"""Time products with 4-bit weights on this GPU, beside bf16 and fp8: one layer of Qwen3-8B's shape.

    python benchmarks/kernels/int4_gpu.py [--rows 1,8,64,512] [--width 128]

Each line has microseconds of a product inside a CUDA graph over copies of its weight that exceed L2
several times: bf16 at its tuned choice, fp8 at its default, then the fastest kernels of 4 bits, the
default marked ``*`` and a kernel whose rows differ from those of the expanded matrix in one bit
``!``. ``x`` is the expansion in memory with the product after it. The last line of a row count is
the chain of all four products of a layer, at the defaults. Labels: rows x features of a tile, u
blocks per iteration, w warps, s stages, p bytes of a weight's row prefetched.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace

import torch
from gemm_gpu import COMPILERS, MAX_LAUNCHES, ROTATED_BYTES, normal
from graph_times import microseconds
from triton.runtime.errors import OutOfResources

from sametoken.ops.model.gemm import triton as gemm
from sametoken.ops.model.gemm.fp8 import quantize
from sametoken.ops.model.gemm.fp8_triton import HOPPER_MEMORY, Fp8DeviceWeight
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.int4_triton import (
    FEW_ROWS,
    Int4Config,
    Int4DeviceWeight,
    default_config,
    product,
)
from sametoken.ops.model.gemm.selfcheck import ProvenTable
from sametoken.ops.model.gemm.tuning import CANONICAL, GemmShape, load_table

SHAPES = [
    GemmShape(6144, 4096),
    GemmShape(4096, 4096),
    GemmShape(24576, 4096, "silu_mul"),
    GemmShape(4096, 12288),
]
ROWS = (1, 8, 64, 128, 512, 2048)
SHOWN = 4


def label(config: Int4Config) -> str:
    early = f"p{config.prefetch_bytes}" if config.prefetch_bytes else ""
    shape = f"{config.block_rows}x{config.block_features}"
    return f"{shape}u{config.unroll}w{config.num_warps}s{config.num_stages}{early}"


def candidates(shape: GemmShape, rows: int) -> list[Int4Config]:
    """List the kernels for few rows, the default first."""
    default = default_config(shape.out_features, rows, HOPPER_MEMORY)
    size, found = default.block_rows, [default]
    if rows <= 32:
        found += [Int4Config(size, 64, 2, 4, depth) for depth in (3, 4, 6, 8)]
        found += [Int4Config(size, 64, 4, 4, depth) for depth in (3, 4)]
        found += [Int4Config(size, 64, 1, 4, 8), Int4Config(size, 128, 1, 4, 6)]
    else:
        found += [Int4Config(size, 64, 1, 4, depth) for depth in (3, 4, 6)]
        found += [Int4Config(size, 64, 2, 4, 3), Int4Config(size, 128, 1, 8, 4)]
    found += [replace(default, prefetch_bytes=early) for early in (0, 1024)]
    if rows > 64:
        found += [Int4Config(128, 64, 1, 4, 3), Int4Config(128, 128, 1, 8, 3)]
    return list(dict.fromkeys(found))


def panels_of(shape: GemmShape, width: int) -> Int4Panels:
    """Random values, without zeros of their own."""
    n, blocks = shape.out_features, shape.in_features // 128
    bits = torch.randint(-(2**31), 2**31, (n, 16 * blocks), device="cuda").int()
    scales = torch.rand(128 // width * blocks, n, device="cuda").bfloat16().float() / 128
    return Int4Panels(bits, scales, None, shape.in_features, e2m1=False, fused=True)


def copies(num_bytes: int) -> int:
    return min(MAX_LAUNCHES, max(2, -(-ROTATED_BYTES // num_bytes)))


def compile_share(index: int, rows: list[int], width: int) -> None:
    """Compile one share of all kernels into Triton's cache, in a separate process."""
    jobs = {}
    for shape in SHAPES:
        panels = panels_of(replace(shape, out_features=512), width)
        for count in rows:
            if count > FEW_ROWS:
                continue
            for config in candidates(shape, count):
                jobs[config, shape.epilogue, shape.in_features % 512] = (panels, shape, config)
    for panels, shape, config in list(jobs.values())[index::COMPILERS]:
        try:
            product(normal(1, shape.in_features), panels, shape.epilogue, None, config)
        except OutOfResources:
            continue


def measure(shape: GemmShape, rows: int, width: int, table: ProvenTable) -> None:
    """Print one line."""
    x, panels = normal(rows, shape.in_features), panels_of(shape, width)
    plain = panels.expanded(torch.bfloat16)
    epilogue = shape.epilogue
    many = [plain.clone() for _ in range(copies(plain.nbytes))]
    config = table.choose(shape, rows)
    bf16 = microseconds(lambda matrix: gemm.product(config, x, matrix, epilogue), many)
    bits, scale = quantize(plain)
    float8 = [Fp8DeviceWeight(bits.clone(), scale) for _ in range(copies(bits.nbytes))]
    gated = epilogue == "silu_mul"
    fp8 = microseconds(lambda one: one.gated_matmul(x) if gated else one.matmul(x), float8)
    del many, float8
    expected = gemm.product(CANONICAL, x, plain, epilogue)
    weights = [replace(panels, words=panels.words.clone()) for _ in range(copies(panels.nbytes))]

    def by_expansion(one: Int4Panels) -> torch.Tensor:
        return gemm.product(config, x, one.expanded(x.dtype), epilogue)

    times = [(microseconds(by_expansion, weights), "x" + "*" * (rows > FEW_ROWS))]
    if not torch.equal(by_expansion(panels), expected):
        times[0] = (times[0][0], times[0][1] + "!")
    alone = microseconds(lambda one: one.expanded(x.dtype), weights)
    for index, own in enumerate(candidates(shape, rows) if rows <= FEW_ROWS else ()):
        try:
            wrong = not torch.equal(product(x, panels, epilogue, None, own), expected)
            us = microseconds(lambda one, c=own: product(x, one, epilogue, None, c), weights)
        except OutOfResources:
            continue
        times.append((us, f"{label(own)}{'' if index else '*'}{'!' if wrong else ''}"))
    times.sort()
    shown = times[:SHOWN] + [one for one in times[SHOWN:] if one[1][-1] in "*!x"]
    print(f"{shape.out_features}x{shape.in_features} {rows:4} rows:", end=" ")
    print(f"bf16 {bf16:.1f}, fp8 {fp8:.1f}, expansion alone {alone:.1f};", end=" ")
    print(", ".join(f"{note} {us:.1f}" for us, note in shown), flush=True)


def chain(rows: int, width: int, table: ProvenTable) -> None:
    """Print the time of a layer's four products, each reading what the one before wrote."""
    qkv, o, gate_up, down = SHAPES
    panels = [panels_of(shape, width) for shape in (qkv, o, gate_up, down)]
    layers = []
    for _ in range(copies(sum(one.nbytes for one in panels))):
        own = [replace(one, words=one.words.clone()) for one in panels]
        layers.append([Int4DeviceWeight(one, None, table) for one in own])
    x = normal(rows, 4096)

    def layer(weights: list[Int4DeviceWeight]) -> torch.Tensor:
        y = weights[0].matmul(x)[:, :4096].contiguous()
        return weights[3].matmul(weights[2].gated_matmul(weights[1].matmul(y)))

    print(f"{rows:4} rows, a layer's four products and a copy: {microseconds(layer, layers):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="comma-separated counts")
    parser.add_argument("--width", type=int, default=128, help="features of a group")
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    if options.compile is not None:
        compile_share(options.compile, rows, options.width)
        return
    begun = time.time()
    command = [sys.executable, *sys.argv, "--compile"]
    workers = [subprocess.Popen([*command, str(index)]) for index in range(COMPILERS)]
    for worker in workers:
        worker.wait()
    print(f"{torch.cuda.get_device_name()}; compiled in {time.time() - begun:.0f} s")
    table = ProvenTable(load_table(torch.cuda.get_device_name()))
    matrices = [normal(shape.out_features, shape.in_features) for shape in SHAPES]
    table.prove(matrices, tuple(rows))
    del matrices
    for count in rows:
        for shape in SHAPES:
            measure(shape, count, options.width, table)
        chain(count, options.width, table)
    print(f"done after {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()

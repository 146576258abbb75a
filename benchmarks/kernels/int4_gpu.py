"""Time products with integer weights on this GPU, beside bf16 and fp8: a layer of Qwen3-8B's shape.

    python benchmarks/kernels/int4_gpu.py [--rows 1,8,64,512] [--form gptq_in_pairs]

Each line has microseconds of a product inside a CUDA graph over copies of its weight that exceed L2
several times: bf16 at its tuned choice, fp8 at its default, then the fastest kernels of the form,
the default marked ``*`` and a kernel whose rows differ from those of the expanded matrix in one bit
``!``. ``turns`` is Hopper's, ``x`` the expansion in memory with the product after it. The last line
of a row count is the chain of all four products of a layer, at the defaults. Labels: rows x
features of a tile, u blocks per iteration, w warps, s stages, p bytes of a weight's row prefetched.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from gemm_gpu import copies, normal
from graph_times import COMPILERS, compile_in_parallel, microseconds
from triton.runtime.errors import OutOfResources

from sametoken.ops.hopper import SHARED_MEMORY
from sametoken.ops.model.gemm import int4_hopper
from sametoken.ops.model.gemm import product as gemm
from sametoken.ops.model.gemm.fp8 import quantize
from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.int4_triton import (
    FEW_ROWS,
    Int4Config,
    Int4DeviceWeight,
    default_config,
    product,
)
from sametoken.ops.model.gemm.selfcheck import ProvenTable
from sametoken.ops.model.gemm.triton import Scaling, tiled_product
from sametoken.ops.model.gemm.tuning import (
    CANONICAL,
    GemmShape,
    StreamedConfig,
    scaled_config,
)
from sametoken.ops.triton import device_table

SHAPES = [
    GemmShape(6144, 4096),
    GemmShape(4096, 4096),
    GemmShape(24576, 4096, "silu_mul"),
    GemmShape(4096, 12288),
]
#: Features of a group, bits of codes, and whether there are minima, fp32 scales, and e2m1 codes.
FORMS = {
    "gptq": (128, 4, False, False, False),
    "gptq_in_pairs": (128, 4, False, False, False),
    "q4_0": (32, 4, False, False, False),
    "q4_1": (32, 4, True, False, False),
    "q4_k": (32, 4, True, True, False),
    "q5_k": (32, 6, True, True, False),
    "q6_k": (16, 6, False, True, False),
    "q8_0": (32, 8, False, False, False),
    "mxfp4": (32, 4, False, False, True),
    "nvfp4": (16, 4, False, True, True),
}
ROWS = (1, 8, 64, 128, 512, 2048)
SHOWN = 4


def label(config: Int4Config) -> str:
    early = f"p{config.prefetch_bytes}" if config.prefetch_bytes else ""
    shape = f"{config.block_rows}x{config.block_features}"
    return f"{shape}u{config.unroll}w{config.num_warps}s{config.num_stages}{early}"


def candidates(panels: Int4Panels, rows: int) -> list[Int4Config]:
    """List the kernels for few rows, the default first."""
    default = default_config(panels, rows, SHARED_MEMORY)
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


def panels_of(shape: GemmShape, form: str) -> Int4Panels:
    """Random values, without zeros of their own."""
    width, code_bits, has_minima, wide_scales, e2m1 = FORMS[form]
    n, blocks = shape.out_features, shape.in_features // 128
    bits = torch.randint(-(2**31), 2**31, (n, 16 * blocks), device="cuda").int()
    scales = torch.rand(128 // width * blocks, n, device="cuda").bfloat16().float() / 128
    factors = None
    if form == "mxfp4":
        bytes_of = torch.randint(0x70, 0x80, (blocks, n, 4), device="cuda").to(torch.uint8)
        scales = bytes_of.view(torch.uint32).squeeze(-1)
    if form == "nvfp4":
        scales = torch.randint(0x2020_2020, 0x4040_4040, (2 * blocks, n), device="cuda").int()
        factors = torch.rand(n, device="cuda")
    paired = None
    if form == "gptq_in_pairs":
        scales, paired = scales.bfloat16().view(torch.int16).int() * 0x1_0001, torch.bfloat16
    tops = {4: None, 6: bits.to(torch.int16), 8: bits}[code_bits]
    minima = -scales if has_minima else None
    fused = not wide_scales
    return Int4Panels(bits, scales, minima, shape.in_features, e2m1, fused, tops, factors, paired)


def copy_of(panels: Int4Panels) -> Int4Panels:
    names = ("words", "tops", "scales", "offsets", "factors")
    parts = {name: getattr(panels, name) for name in names}
    return replace(
        panels, **{name: part if part is None else part.clone() for name, part in parts.items()}
    )


def compile_share(index: int, rows: list[int], form: str) -> None:
    """Compile one share of all kernels into Triton's cache, in a separate process."""
    jobs = {}
    for shape in SHAPES:
        panels = panels_of(replace(shape, out_features=512), form)
        for count in rows:
            if count > FEW_ROWS:
                continue
            for config in candidates(panels_of(shape, form), count):
                jobs[config, shape.epilogue, shape.in_features % 512] = (panels, shape, config)
    for panels, shape, config in list(jobs.values())[index::COMPILERS]:
        try:
            product(normal(1, shape.in_features), panels, shape.epilogue, None, config)
        except OutOfResources:
            continue


def measure(shape: GemmShape, rows: int, form: str, table: ProvenTable) -> None:
    """Print one line."""
    x, panels = normal(rows, shape.in_features), panels_of(shape, form)
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
    scaling = None if panels.factors is None else Scaling(panels.factors, None, x.dtype)
    expected = tiled_product(CANONICAL, x, plain, epilogue, None, scaling)
    weights = [copy_of(panels) for _ in range(copies(panels.nbytes))]
    if isinstance(config, StreamedConfig):
        # That kernel would not wait for the matrix.
        config = table.table.in_order(shape, rows)

    def by_expansion(one: Int4Panels) -> torch.Tensor:
        if scaling is None:
            return gemm.product(config, x, one.expanded(x.dtype), epilogue)
        tiles = scaled_config(shape, rows, x.dtype.itemsize, hopper=True)
        return tiled_product(tiles, x, one.expanded(x.dtype), epilogue, None, scaling)

    times = [(microseconds(by_expansion, weights), "x" + "*" * (rows > FEW_ROWS))]
    if not torch.equal(by_expansion(panels), expected):
        times[0] = (times[0][0], times[0][1] + "!")
    alone = microseconds(lambda one: one.expanded(x.dtype), weights)
    if rows <= int4_hopper.FEW_ROWS and int4_hopper.serves(panels, x.dtype):
        wrong = not torch.equal(int4_hopper.product(x, panels, epilogue), expected)
        us = microseconds(lambda one: int4_hopper.product(x, one, epilogue), weights)
        times.append((us, f"turns*{'!' if wrong else ''}"))
    for index, own in enumerate(candidates(panels, rows) if rows <= FEW_ROWS else ()):
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


def chain(rows: int, form: str, table: ProvenTable) -> None:
    """Print the time of a layer's four products, each reading what the one before wrote."""
    qkv, o, gate_up, down = SHAPES
    panels = [panels_of(shape, form) for shape in (qkv, o, gate_up, down)]
    layers = []
    for _ in range(copies(sum(one.nbytes for one in panels))):
        own = [copy_of(one) for one in panels]
        layers.append([Int4DeviceWeight(one, None, table) for one in own])
    x = normal(rows, 4096)

    def layer(weights: list[Int4DeviceWeight]) -> torch.Tensor:
        y = weights[0].matmul(x)[:, :4096].contiguous()
        return weights[3].matmul(weights[2].gated_matmul(weights[1].matmul(y)))

    print(f"{rows:4} rows, a layer's four products and a copy: {microseconds(layer, layers):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="comma-separated counts")
    parser.add_argument("--form", choices=FORMS, default="gptq_in_pairs", help="of the weights")
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    if options.compile is not None:
        compile_share(options.compile, rows, options.form)
        return
    begun = time.time()
    compile_in_parallel()
    print(f"{torch.cuda.get_device_name()}; compiled in {time.time() - begun:.0f} s")
    table = ProvenTable(device_table())
    for shape in SHAPES:
        # Proofs are of shapes that were asked for.
        table.choose(shape, 1)
    matrices = [normal(shape.out_features, shape.in_features) for shape in SHAPES]
    table.prove(matrices, tuple(rows))
    del matrices
    for count in rows:
        for shape in SHAPES:
            measure(shape, count, options.form, table)
        chain(count, options.form, table)
    print(f"done after {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()

"""Compare GEMM kernels on this GPU: check bits, time, print.

    python benchmarks/kernels/gemm_gpu.py [--only qwen3] [--rows 1,4,64]

Every time is of one product inside a CUDA graph over copies of the weight that exceed L2 several
times, so weights are read from memory. A candidate whose rows differ from the canonical kernel's
in one bit is shown with ``!`` and never chosen. Inside a step other kernels win
(``decode_gpu.py``).
"""

from __future__ import annotations

import argparse
import time

import torch
from graph_times import COMPILERS, compile_in_parallel, microseconds
from triton.runtime.errors import OutOfResources

from sametoken.ops.model.gemm.product import product
from sametoken.ops.model.gemm.tuning import (
    CANONICAL,
    MANY_ROWS,
    ROW_BUCKETS,
    CublasConfig,
    GemmConfig,
    GemmShape,
    StreamedConfig,
    TritonConfig,
    in_order_config,
)

SHAPES = {
    "qwen3": [
        GemmShape(6144, 4096),
        GemmShape(4096, 4096),
        GemmShape(24576, 4096, "silu_mul"),
        GemmShape(24576, 4096),
        GemmShape(4096, 12288),
        GemmShape(151936, 4096, "logits"),
    ],
    "llama3": [
        GemmShape(28672, 4096, "silu_mul"),
        GemmShape(4096, 14336),
        GemmShape(128256, 4096, "logits"),
    ],
    "eagle3": [GemmShape(6144, 8192), GemmShape(32000, 4096, "logits")],
    "qwen35": [
        GemmShape(12352, 4096),
        GemmShape(10240, 4096),
        GemmShape(4096, 8192),
        GemmShape(248320, 4096, "logits"),
    ],
    "smollm2": [
        GemmShape(960, 576),
        GemmShape(576, 576),
        GemmShape(3072, 576, "silu_mul"),
        GemmShape(576, 1536),
        GemmShape(49152, 576, "logits"),
    ],
    "qwen3-moe": [
        GemmShape(5120, 2048),
        GemmShape(2048, 4096),
        GemmShape(151936, 2048, "logits"),
    ],
    "lightning": [
        GemmShape(10304, 2688),
        GemmShape(4608, 2688),
        GemmShape(2688, 4096),
        GemmShape(3712, 2688),
        GemmShape(2688, 3712),
        GemmShape(131072, 2688, "logits"),
    ],
    "glm": [
        GemmShape(1344, 2048),
        GemmShape(5120, 768),
        GemmShape(2048, 5120),
        GemmShape(3072, 2048, "silu_mul"),
        GemmShape(2048, 1536),
        GemmShape(154880, 2048, "logits"),
    ],
}
MAX_LOGITS_ROWS = 512
ROTATED_BYTES = 400 << 20
MAX_LAUNCHES = 128
HEADER = """\
| weight | rows | best | us | no overlap us | cuBLAS free us | best/free | TB/s | TFLOP/s | all us |
|---|---|---|---|---|---|---|---|---|---|"""

T = TritonConfig
#: Narrow weights have too few bytes in flight: 1 us of latency at 4.6 TB/s is 4.6 MB, so their few
#: programs need deep pipelines. Programs of wide weights share a multiprocessor.
UP_TO_16 = [
    T(16, 64, 128, 4, 3),
    T(16, 64, 128, 4, 5),
    T(16, 64, 128, 4, 7),
    T(16, 64, 128, 4, 10),
    T(16, 64, 128, 4, 8, tma=True),
    T(16, 64, 256, 4, 3, tma=True),
    T(16, 64, 256, 4, 5, tma=True),
    T(16, 32, 256, 4, 3),
    T(16, 32, 256, 4, 5),
    T(16, 32, 256, 4, 8),
    T(16, 32, 256, 4, 6, tma=True),
    T(16, 32, 256, 4, 8, tma=True),
    T(16, 32, 128, 4, 10),
    T(16, 16, 256, 2, 4),
    T(16, 128, 64, 4, 6),
    T(16, 128, 128, 4, 4, tma=True),
    T(16, 64, 64, 4, 6),
    T(16, 32, 128, 4, 5),
    T(16, 64, 128, 4, 4),
]
UP_TO_32 = [
    T(32, 64, 128, 4, 3),
    T(32, 64, 128, 4, 5, tma=True),
    T(32, 64, 128, 4, 7, tma=True),
    T(32, 64, 128, 4, 9, tma=True),
    T(32, 64, 256, 4, 4, tma=True),
    T(32, 32, 256, 4, 6),
    T(32, 32, 256, 4, 6, tma=True),
    T(32, 128, 64, 4, 5, tma=True),
    T(32, 64, 64, 4, 5),
    T(32, 64, 64, 4, 4, tma=True),
    T(32, 64, 64, 4, 5, tma=True),
    T(32, 32, 128, 4, 4),
    T(32, 32, 128, 4, 4, tma=True),
    T(32, 128, 32, 4, 5, tma=True),
    T(16, 64, 128, 4, 3),
    T(16, 64, 64, 4, 6),
]
UP_TO_64 = [
    T(64, 64, 128, 4, 3),
    T(64, 64, 128, 4, 4, tma=True),
    T(64, 64, 128, 4, 6, tma=True),
    T(64, 64, 128, 4, 7, tma=True),
    T(64, 64, 256, 4, 3, tma=True),
    T(64, 64, 64, 4, 6, tma=True),
    T(64, 128, 64, 4, 4, tma=True),
    T(64, 128, 64, 4, 8, tma=True),
    T(32, 64, 128, 4, 4, tma=True),
    T(32, 64, 128, 4, 7, tma=True),
    T(32, 64, 128, 4, 9, tma=True),
    T(32, 64, 256, 4, 4, tma=True),
    T(64, 64, 64, 4, 4, tma=True),
    T(64, 32, 128, 4, 4, tma=True),
    T(64, 128, 32, 4, 5, tma=True),
]
UP_TO_128 = [
    T(64, 64, 128, 4, 3, tma=True),
    T(64, 64, 128, 4, 4, tma=True),
    T(64, 64, 128, 4, 6, tma=True),
    T(128, 64, 64, 4, 3, tma=True),
    T(128, 64, 64, 4, 5, tma=True),
    T(128, 64, 128, 4, 4, tma=True),
    T(128, 128, 64, 8, 4, tma=True),
    T(64, 128, 64, 4, 5, tma=True),
    *MANY_ROWS,
]
BEYOND = [
    *MANY_ROWS,
    T(128, 64, 64, 4, 3, tma=True),
    T(128, 64, 64, 4, 5, tma=True),
    T(128, 64, 64, 4, 8, tma=True),
    T(128, 64, 128, 4, 4, tma=True),
    T(128, 128, 64, 8, 4, tma=True),
    T(128, 128, 64, 8, 6, tma=True),
    T(256, 64, 64, 8, 4, tma=True),
    T(256, 128, 64, 8, 3, tma=True),
    T(256, 128, 64, 8, 4, tma=True),
    T(128, 256, 64, 8, 3, tma=True),
]


def candidates(shape: GemmShape, rows: int) -> list[GemmConfig]:
    limits = [(16, UP_TO_16), (32, UP_TO_32), (64, UP_TO_64), (128, UP_TO_128)]
    found = next((configs for limit, configs in limits if rows <= limit), BEYOND)
    out: list[GemmConfig] = [CublasConfig(), in_order_config(shape, rows, hopper=True)]
    out += [config for config in found if config not in out and fits(config, shape)]
    return out + streamed(shape, rows)


def streamed(shape: GemmShape, rows: int) -> list[GemmConfig]:
    """Tiles of the Hopper kernel of few rows; up to 256 rows, several tiles of rows."""
    if rows > 256 or torch.cuda.get_device_capability()[0] != 9:
        return []
    sizes = [size for size in (8, 16, 32, 64, 128) if size >= min(rows, 128)][:1]
    sizes += [64] if rows > 64 else []
    gated = shape.epilogue == "silu_mul"
    widths = [(32, 1), (32, 2), (32, 3)] if gated else [(32, 1), (48, 1), (64, 1), (64, 2)]
    boxes = [2, 4] if rows <= 32 else [1, 2]
    return [
        StreamedConfig(size, width, box, groups)
        for size in sizes
        for width, groups in widths
        for box in boxes
        if size < 128 or box == 1
    ]


def fits(config: TritonConfig, shape: GemmShape) -> bool:
    """Return whether a program's tiles fit shared memory and its sums the registers."""
    gated = shape.epilogue == "silu_mul"
    sums = config.block_rows * config.block_features
    rows, weights = config.block_rows, config.block_features * (1 + gated)
    # Narrow tiles leave shared memory before their product, so one stage needs no room.
    stages = config.num_stages - (config.block_features < 64)
    return 2 * config.block_depth * (rows + weights) * stages < 227 << 10 and not (
        gated and sums > 1 << 14
    )


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


def compile_share(index: int, shapes: list[GemmShape], rows: list[int]) -> None:
    """Compile one share of all kernels into Triton's cache, in a separate process."""
    jobs: dict[tuple, tuple[GemmConfig, GemmShape]] = {}
    for shape in shapes:
        for count in rows:
            for config in [CANONICAL, *candidates(shape, count)]:
                if not isinstance(config, CublasConfig):
                    depth = config.block_depth if isinstance(config, TritonConfig) else 1
                    even = shape.in_features % depth == 0
                    jobs[config, shape.epilogue, even, shape.in_features >= 4096] = config, shape
    for config, shape in list(jobs.values())[index::COMPILERS]:
        features = 1024 if shape.epilogue == "silu_mul" else 512
        try:
            product(config, normal(1, shape.in_features), normal(features, shape.in_features),
                    shape.epilogue)  # fmt: skip
        except OutOfResources:
            continue


def canonical_rows(x: torch.Tensor, matrix: torch.Tensor, shape: GemmShape) -> torch.Tensor:
    parts = [
        product(CANONICAL, x[at : at + 16], matrix, shape.epilogue) for at in range(0, len(x), 16)
    ]
    return torch.cat(parts)


def library_agrees(
    x: torch.Tensor, matrix: torch.Tensor, shape: GemmShape, rows: int, expected: torch.Tensor
) -> bool:
    """Whether the library gives canonical bits at row counts all over the bucket of ``rows``."""
    below = max((bucket for bucket in ROW_BUCKETS if bucket < rows), default=0)
    for count in range(rows, below, -max(1, (rows - below) // 24)):
        out = product(CublasConfig(), x[:count], matrix, shape.epilogue)
        if not torch.equal(out, expected[:count]):
            return False
    return True


def overlaps(config: GemmConfig) -> bool:
    """Whether a kernel starts before the one in front has ended."""
    return isinstance(config, StreamedConfig) or (isinstance(config, TritonConfig) and config.pdl)


def label(config: GemmConfig) -> str:
    if isinstance(config, CublasConfig):
        return "cublas"
    tile = f"{config.block_rows}x{config.block_features}"
    if isinstance(config, StreamedConfig):
        return f"{tile}b{config.boxes}g{config.warp_groups}"
    release = {"early": "", "late": "+", "never": "-"}[config.release]
    flags = ("t" if config.tma else "") + (f"o{config.prefetch_bytes}" if config.pdl else "")
    return f"{tile}x{config.block_depth}w{config.num_warps}s{config.num_stages}{flags}{release}"


def copies(num_bytes: int) -> int:
    """How many weights of a size leave L2."""
    return min(MAX_LAUNCHES, max(2, -(-ROTATED_BYTES // num_bytes)))


def compare(shape: GemmShape, row_counts: list[int]) -> None:
    """Print a line of the table for each row count."""
    weight_bytes = shape.out_features * shape.in_features * 2
    scale = shape.in_features**-0.5
    weights = [
        normal(shape.out_features, shape.in_features, scale=scale)
        for _ in range(copies(weight_bytes))
    ]
    counts = [n for n in row_counts if shape.epilogue != "logits" or n <= MAX_LOGITS_ROWS]
    x = normal(max(counts), shape.in_features)
    expected = canonical_rows(x, weights[0], shape)
    for rows in counts:
        part, want = x[:rows], expected[:rows]
        times: dict[GemmConfig, float] = {CANONICAL: float("inf")}
        notes: list[str] = []
        for config in candidates(shape, rows):

            def call(weight: torch.Tensor, config: GemmConfig = config) -> torch.Tensor:
                return product(config, part, weight, shape.epilogue)  # noqa: B023

            try:
                equal = torch.equal(call(weights[0]), want)
                if isinstance(config, CublasConfig):
                    equal = equal and library_agrees(x, weights[0], shape, rows, expected)
                elapsed = microseconds(call, weights)
            except OutOfResources:
                notes.append(f"{label(config)} does not fit")
                continue
            notes.append(f"{label(config)} {elapsed:.1f}{'' if equal else '!'}")
            if equal:
                times[config] = elapsed
        free = microseconds(lambda weight: torch.mm(part, weight.t()), weights)  # noqa: B023
        best = min(times, key=times.__getitem__)
        plain = [time for config, time in times.items() if not overlaps(config)]
        flops = 2 * rows * shape.out_features * shape.in_features
        print(
            f"| {shape.out_features}x{shape.in_features} {shape.epilogue} | {rows} "
            f"| {label(best)} | {times[best]:.1f} | {min(plain):.1f} | {free:.1f} "
            f"| {times[best] / free:.2f} | {weight_bytes / times[best] / 1e6:.2f} "
            f"| {flops / times[best] / 1e6:.0f} | {', '.join(notes)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated models; default: all")
    parser.add_argument("--rows", default=",".join(map(str, ROW_BUCKETS)))
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    models = options.only.split(",") if options.only else list(SHAPES)
    shapes = [shape for model in models for shape in SHAPES[model]]
    rows = [int(count) for count in options.rows.split(",")]
    if options.compile is not None:
        compile_share(options.compile, shapes, rows)
        return

    begun = time.time()
    compile_in_parallel()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; compiled in {time.time() - begun:.0f} s")
    print(HEADER)
    for shape in shapes:
        compare(shape, rows)
    print(f"done after {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()

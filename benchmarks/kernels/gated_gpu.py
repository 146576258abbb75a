"""Time gate, up and SiLU of many rows by Hopper's kernel, beside the kernels that served before.

    python benchmarks/kernels/gated_gpu.py [--rows 256,512,1024,2048,4096] [--shape 12288x4096]

A line has the products of a layer of Qwen3-8B's shape in a CUDA graph, in bf16 and in float8, run
for long enough that the chip's power limits them; forms take turns, and every turn is shown. A form
whose rows differ from the first one's in one bit is marked ``!``. ``*`` is what the engine takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sametoken.ops.model.gemm import fp8_triton
from sametoken.ops.model.gemm.fp8 import Fp8Weight, quantize
from sametoken.ops.model.gemm.triton import product
from sametoken.ops.model.gemm.tuning import (
    CublasConfig,
    GatedConfig,
    GemmConfig,
    GemmShape,
    gated_config,
)

TURNS, SECONDS, LAYERS = 3, 0.4, 8
GATED = (GatedConfig(128), GatedConfig(64))


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def graph_of(layer: Callable[[], object]) -> torch.cuda.CUDAGraph:
    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAYERS):
            layer()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one layer, over ``SECONDS``."""

    def timed(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / replays

    timed(1)
    replays = max(2, int(SECONDS * 1e3 / timed(1)))
    return timed(replays) / LAYERS * 1e3


def compare(
    name: str,
    gates: dict[str, Callable[[], Tensor]],
    others: list[Callable[[], Tensor]],
    chosen: str,
) -> None:
    first = next(iter(gates.values()))()
    graphs, labels = {}, {}
    for label, gate in gates.items():
        equal = torch.equal(gate(), first)
        labels[label] = label + ("" if equal else "!") + ("*" if label == chosen else "")
        graphs[label] = graph_of(lambda gate=gate: [gate(), *(other() for other in others)])
    times: dict[str, list[float]] = {label: [] for label in gates}
    for _ in range(TURNS):
        for label, graph in graphs.items():
            times[label].append(microseconds(graph))
    shown = (f"{labels[k]} {' '.join(f'{one:.0f}' for one in v)}" for k, v in times.items())
    print(f"{name}: {'; '.join(shown)}", flush=True)


def in_bf16(rows: int, features: int, width: int, chosen: GemmConfig | None) -> None:
    x, gated = normal(rows, width), normal(rows, features)
    gate_up = normal(2 * features, width, scale=0.02)
    matrices = [(x, normal(size, width, scale=0.02)) for size in (width * 3 // 2, width)]
    matrices.append((gated, normal(width, features, scale=0.02)))
    configs = {"cublas": CublasConfig(), **{f"gated{c.block_features}": c for c in GATED}}
    compare(
        f"bf16 {rows} rows",
        {k: partial(product, c, x, gate_up, "silu_mul") for k, c in configs.items()},
        [partial(product, CublasConfig(), rows, matrix) for rows, matrix in matrices],
        "cublas" if chosen is None else f"gated{chosen.block_features}",
    )


def in_float8(rows: int, features: int, width: int, chosen: GemmConfig | None) -> None:
    def weight(out_features: int, in_features: int) -> Fp8Weight:
        return Fp8Weight(*quantize(normal(out_features, in_features, scale=0.02)))

    x, gated = normal(rows, width), normal(rows, features)
    gate_up = weight(2 * features, width)
    shape = GemmShape(2 * features, width, "silu_mul")
    former = fp8_triton.default_config(shape, rows, pdl=True)
    others = [(x, weight(width * 3 // 2, width)), (x, weight(width, width))]
    others.append((gated, weight(width, features)))
    configs = {"triton": former, **{f"gated{c.block_features}": c for c in GATED}}
    compare(
        f"float8 {rows} rows",
        {
            k: partial(fp8_triton.product, x, gate_up, "silu_mul", config=c)
            for k, c in configs.items()
        },
        [partial(fp8_triton.product, rows, matrix) for rows, matrix in others],
        "triton" if chosen is None else f"gated{chosen.block_features}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="256,512,768,1024,1408,2048,4096")
    parser.add_argument("--shape", default="12288x4096", help="features of gate x of its input")
    arguments = parser.parse_args()
    features, width = map(int, arguments.shape.split("x"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us of a layer's products")
    for rows in map(int, arguments.rows.split(",")):
        chosen = gated_config(GemmShape(2 * features, width, "silu_mul"), rows)
        in_bf16(rows, features, width, chosen)
        in_float8(rows, features, width, chosen)


if __name__ == "__main__":
    main()

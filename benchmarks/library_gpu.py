"""Choose among the vendor's algorithms for a product as they run at the chip's power limit.

    python benchmarks/library_gpu.py [--rows 256,2048] [--only qwen3,qwen35] [--out FILE]

A step of hundreds of rows runs at the power limit for minutes, where the library's own choice,
made for a product alone on a cool chip, is not always the fastest. So each algorithm runs for a
while before it is timed, between two timings of the table's choice. Algorithms whose bits differ
from the canonical kernel's are shown with ``!`` and never chosen; a change must gain ``GAIN``.
Writes the table with its changes to --out ($OUT by default).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gemm_gpu import SHAPES, canonical_rows, label, normal

from sametoken.kernels.gemm.cublas import Problem, algorithms
from sametoken.kernels.gemm.triton import product
from sametoken.kernels.gemm.tuning import (
    CublasConfig,
    GemmConfig,
    GemmShape,
    TuningTable,
    load_table,
    row_bucket,
    table_name,
)

ROWS = (256, 384, 512, 2048)
#: No captured step makes logits of more rows.
MAX_LOGITS_ROWS = 384
ROTATED_BYTES = 300 << 20
WARM_UP_SECONDS, SETTLED_MS, TIMED_MS = 1.5, 120.0, 160.0
#: An algorithm must take less than this part of the time of what is there, which noise does not.
GAIN = 0.985
SHOWN = 4


def captured(call: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> Callable:
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    return graph.replay


def milliseconds(replay: Callable, times: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / times


def settled(replay: Callable) -> float:
    """Milliseconds of a replay, once the clock has settled for it."""
    once = milliseconds(replay, 1)
    milliseconds(replay, max(1, int(SETTLED_MS / once)))
    return milliseconds(replay, max(1, int(TIMED_MS / once)))


def warm_up() -> None:
    square = normal(8192, 8192)
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_SECONDS:
        torch.mm(square, square)
        torch.cuda.synchronize()


def best(shape: GemmShape, rows: int, table: TuningTable) -> CublasConfig | None:
    """The algorithm that beats the table's choice, if one does; prints what was measured."""
    weight_bytes = 2 * shape.out_features * shape.in_features
    copies = max(2, min(12, ROTATED_BYTES // weight_bytes + 1))
    weights = [normal(shape.out_features, shape.in_features) for _ in range(copies)]
    x = normal(rows, shape.in_features)
    expected = canonical_rows(x, weights[0], shape)

    def replay_of(config: GemmConfig) -> Callable:
        return captured(lambda weight: product(config, x, weight, shape.epilogue), weights)

    now = table.choose(shape, rows)
    out_dtype = torch.float32 if shape.epilogue == "logits" else x.dtype
    problem = Problem(shape.out_features, shape.in_features, rows, x.dtype, out_dtype, 0)
    held = replay_of(now)
    before = settled(held)
    times: dict[CublasConfig, float] = {}
    others = []
    for config in algorithms(problem):
        if torch.equal(product(config, x, weights[0], shape.epilogue), expected):
            times[config] = settled(replay_of(config))
        else:
            others.append(f"{label(config)}!")
    usual = (before + settled(held)) / 2
    ranked = sorted(times, key=times.__getitem__)
    shown = [f"{label(c)} {1e3 * times[c] / copies:.1f}" for c in ranked[:SHOWN]]
    print(
        f"{shape.out_features}x{shape.in_features} {shape.epilogue}, {rows} rows: {label(now)}"
        f" {1e3 * usual / copies:.1f} us; {', '.join(shown + others)}",
        flush=True,
    )
    return ranked[0] if ranked and times[ranked[0]] < GAIN * usual else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = Path(os.environ.get("OUT", "."))
    device = torch.cuda.get_device_name()
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="qwen3,qwen35", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--out", type=Path, default=folder / table_name(device))
    options = parser.parse_args()
    table = load_table(device)
    warm_up()
    for rows in map(int, options.rows.split(",")):
        for shape in (shape for name in options.only.split(",") for shape in SHAPES[name]):
            if shape.epilogue == "logits" and rows > MAX_LOGITS_ROWS:
                continue
            if shape.epilogue == "silu_mul":
                continue
            found = best(shape, rows, table)
            if found is not None:
                for entry in [entry for entry in table.entries if same_weight(entry, shape)]:
                    table = table.replaced(entry, row_bucket(rows), found)
            torch.cuda.empty_cache()
    options.out.write_text(table.to_json())


def same_weight(one: GemmShape, other: GemmShape) -> bool:
    return (one.out_features, one.in_features) == (other.out_features, other.in_features)


if __name__ == "__main__":
    main()

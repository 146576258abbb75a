"""Times of the native CPU kernels at SmolLM2-135M's shapes, against torch's own.

Every layer has weights and KV of its own, so that caches see what a real step shows them.
Times are the best of several passes over all layers; run on an idle machine:

    python benchmarks/kernels_cpu.py [--rows 1,4,8] [--context 500] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.interface import AttentionRows, AttentionShape, LayerKV, RotaryTable
from sametoken.kernels.native.bundle import NativeKernels

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, BLOCK = 30, 576, 1536, 49152, 16
SHAPE = AttentionShape(9, 3, 64)
LINEARS = {
    "qkv": (SHAPE.q_size + 2 * SHAPE.kv_size, HIDDEN),
    "o": (HIDDEN, SHAPE.q_size),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}


@dataclass(frozen=True)
class Line:
    """One table line: seconds of one call, and what it reads and computes."""

    name: str
    seconds: float
    torch_seconds: float | None
    bytes: float
    flops: float
    calls_per_step: int

    def __str__(self) -> str:
        torch_time = f"{self.torch_seconds * 1e6:10.1f}" if self.torch_seconds else " " * 10
        return (
            f"{self.name:14}{self.seconds * 1e6:10.1f}{torch_time}"
            f"{self.bytes / self.seconds / 1e9:10.1f}{self.flops / self.seconds / 1e9:10.1f}"
            f"{self.seconds * self.calls_per_step * 1e3:10.2f}"
        )


def best(function: Callable[[int], object], calls: int, passes: int) -> float:
    """Seconds per call: the fastest pass of ``calls`` calls, numbered from 0."""
    fastest = float("inf")
    for _ in range(passes):
        start = time.perf_counter()
        for index in range(calls):
            function(index)
        fastest = min(fastest, (time.perf_counter() - start) / calls)
    return fastest


class Bench:
    """Weights and KV of a whole model, and one window of ``rows`` rows over them."""

    def __init__(self, context: int) -> None:
        self.kernels = NativeKernels()
        self.context = context
        self.weights = {
            name: [self.weight(n, k) for _ in range(LAYERS)] for name, (n, k) in LINEARS.items()
        }
        self.head = self.weight(VOCABULARY, HIDDEN)
        positions = context + 256
        self.blocks = -(-positions // BLOCK)
        memory = torch.randn(LAYERS, 2, self.blocks, SHAPE.num_kv_heads, BLOCK, SHAPE.head_dim)
        self.kv = [LayerKV(layer[0], layer[1]) for layer in memory.bfloat16()]
        angles = torch.rand(positions, SHAPE.head_dim // 2)
        self.rotary = RotaryTable(angles.cos(), angles.sin())

    def weight(self, n: int, k: int):
        plain = torch.randn(n, k).bfloat16()
        return self.kernels.pack(plain), plain

    def lines(self, rows: int, passes: int) -> list[Line]:
        lines = [self.linear_line(name, rows, passes) for name in LINEARS]
        lines += [self.head_line(rows, passes), self.attention_line(rows, passes)]
        return lines + self.small_lines(rows, passes)

    def linear_line(self, name: str, rows: int, passes: int) -> Line:
        n, k = LINEARS[name]
        x, weights = torch.randn(rows, k).bfloat16(), self.weights[name]
        native = best(lambda i: self.kernels.linear(x, weights[i][0]), LAYERS, passes)
        plain = best(lambda i: F.linear(x, weights[i][1]), LAYERS, passes)
        return Line(name, native, plain, 2 * n * k, 2 * n * k * rows, LAYERS)

    def head_line(self, rows: int, passes: int) -> Line:
        x, (packed, plain) = torch.randn(rows, HIDDEN).bfloat16(), self.head
        native = best(lambda _: self.kernels.logits(x, packed), 1, passes)
        reference = best(lambda _: F.linear(x, plain), 1, passes)
        size = VOCABULARY * HIDDEN
        return Line("lm_head", native, reference, 2 * size, 2 * size * rows, 1)

    def where(self, rows: int) -> AttentionRows:
        positions = torch.arange(self.context, self.context + rows)
        table = torch.arange(self.blocks)[None]
        return AttentionRows(positions, torch.zeros_like(positions), positions.clone(), table)

    def attention_line(self, rows: int, passes: int) -> Line:
        where, kernels = self.where(rows), self.kernels
        q = torch.randn(rows, SHAPE.num_heads, SHAPE.head_dim).bfloat16()
        native = best(lambda i: kernels.attention(q, SHAPE, where, self.kv[i]), LAYERS, passes)
        seen = self.context + rows
        visible = torch.arange(seen)[None] <= where.positions[:, None]

        def plain(layer: int) -> Tensor:
            keys, values = (
                cache.transpose(0, 1).flatten(1, 2)[None, :, :seen]
                for cache in (self.kv[layer].keys, self.kv[layer].values)
            )
            return F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys, values, attn_mask=visible, enable_gqa=True
            )

        kv_bytes = 2 * 2 * seen * SHAPE.kv_size
        flops = 4 * rows * seen * SHAPE.q_size
        reference = best(plain, LAYERS, passes)
        return Line("attention", native, reference, kv_bytes, flops, LAYERS)

    def small_lines(self, rows: int, passes: int) -> list[Line]:
        kernels, where = self.kernels, self.where(rows)
        x, residual = torch.randn(2, rows, HIDDEN).bfloat16()
        norm_weight = torch.ones(HIDDEN).bfloat16()
        gate_up = torch.randn(rows, 2 * INTERMEDIATE).bfloat16()
        qkv = torch.randn(rows, LINEARS["qkv"][0]).bfloat16()
        token_ids = torch.randint(0, VOCABULARY, (rows,))
        logits, seeds = torch.randn(rows, VOCABULARY), torch.arange(rows)
        greedy, warm = torch.zeros(rows), torch.ones(rows)

        def timed(name: str, function: Callable, per_step: int, moved: int) -> Line:
            seconds = best(lambda _: function(), LAYERS, passes)
            return Line(name, seconds, None, moved, 0, per_step)

        def rope() -> Tensor:
            return kernels.rope_and_cache(qkv, SHAPE, self.rotary, where, self.kv[0], None)

        def norm() -> Tensor:
            return kernels.add_rms_norm(x, residual, norm_weight, 1e-5)[0]

        def sampled(temperature: Tensor) -> Tensor:
            return kernels.sample(logits, temperature, seeds, where.positions)

        silu, embed = (lambda: kernels.silu_mul(gate_up)), self.head[0]
        return [
            timed("rope_and_cache", rope, LAYERS, 4 * qkv.numel()),
            timed("add_rms_norm", norm, 2 * LAYERS, 8 * x.numel()),
            timed("silu_mul", silu, LAYERS, 3 * gate_up.numel()),
            timed("embedding", lambda: kernels.embedding(token_ids, embed), 1, 4 * x.numel()),
            timed("sample T=0", lambda: sampled(greedy), 1, 4 * logits.numel()),
            timed("sample T=1", lambda: sampled(warm), 0, 4 * logits.numel()),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,8,16,65,256")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options.context)
    print(f"SmolLM2-135M bf16, context {options.context}, {options.threads} threads")
    for rows in map(int, options.rows.split(",")):
        lines = bench.lines(rows, passes=10 if rows < 64 else 4)
        print(f"\n{rows} rows      us/call  torch us      GB/s   GFLOP/s   ms/step")
        print("\n".join(map(str, lines)))
        total = sum(line.seconds * line.calls_per_step for line in lines)
        print(f"{'step':54}{total * 1e3:10.2f}")


if __name__ == "__main__":
    main()

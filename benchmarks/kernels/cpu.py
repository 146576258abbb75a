"""Times of the native CPU kernels at SmolLM2-135M's shapes, beside torch's.

All operations of a step run in the model's order, and each layer has separate weights and KV, so
that caches behave as in a real step. The time of a call is the best of several passes, the time of
an operation the mean over its layers. Then Gated DeltaNet between its projections at Qwen3.5-9B's
shape, beside the same rows in PyTorch:

    python benchmarks/kernels/cpu.py [--rows 1,4,8] [--context 500] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.ops.backend import AttentionRows, AttentionShape, Kernels, LayerKV, RotaryTable
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.state.caches import ModelCache

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, BLOCK = 30, 576, 1536, 49152, 16
MAX_ROWS = 1024
SHAPE = AttentionShape(9, 3, 64)
LINEARS = {
    "qkv": (SHAPE.q_size + 2 * SHAPE.kv_size, HIDDEN),
    "o": (HIDDEN, SHAPE.q_size),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}

NUM_RECURRENT, RECURRENT = 8, Recurrent(GatedDelta(16, 32, 128, 128, 4), torch.bfloat16)

#: Operations of one layer (or of the end of a step) by name, each taking the layer's index.
Operations = Mapping[str, Callable[[int], object]]


def measure(operations: Operations, layers: int, passes: int) -> dict[str, float]:
    """Seconds per call: the best of ``passes`` for each layer, averaged over layers."""
    fastest = {name: [float("inf")] * layers for name in operations}
    for _ in range(passes):
        for layer in range(layers):
            for name, function in operations.items():
                start = time.perf_counter()
                function(layer)
                seconds = time.perf_counter() - start
                fastest[name][layer] = min(fastest[name][layer], seconds)
    return {name: sum(times) / layers for name, times in fastest.items()}


class Model:
    """Weights and KV of all layers, packed and plain."""

    def __init__(self, context: int) -> None:
        self.kernels, self.context = NativeKernels(), context
        self.plain = {
            name: [torch.randn(n, k).bfloat16() for _ in range(LAYERS)]
            for name, (n, k) in LINEARS.items()
        }
        self.packed = {name: [*map(self.kernels.pack, w)] for name, w in self.plain.items()}
        self.head = torch.randn(VOCABULARY, HIDDEN).bfloat16()
        self.packed_head = self.kernels.pack(self.head)
        positions = context + MAX_ROWS
        self.blocks = -(-positions // BLOCK)
        memory = torch.randn(LAYERS, 2, self.blocks, SHAPE.num_kv_heads, BLOCK, SHAPE.head_dim)
        self.kv = [LayerKV(layer[0], layer[1]) for layer in memory.bfloat16()]
        angles = torch.rand(positions, SHAPE.head_dim // 2)
        self.rotary = RotaryTable(angles.cos(), angles.sin())
        self.norm = torch.ones(HIDDEN).bfloat16()

    def window(self, rows: int) -> AttentionRows:
        positions = torch.arange(self.context, self.context + rows)
        table = torch.arange(self.blocks)[None]
        return AttentionRows(positions, torch.zeros_like(positions), positions.clone(), table)

    def native_layer(self, rows: int) -> Operations:
        kernels, packed, where = self.kernels, self.packed, self.window(rows)
        x, residual = torch.randn(2, rows, HIDDEN).bfloat16()
        qkv = torch.randn(rows, LINEARS["qkv"][0]).bfloat16()
        q = torch.randn(rows, SHAPE.num_heads, SHAPE.head_dim).bfloat16()
        wide = torch.randn(rows, INTERMEDIATE).bfloat16()
        gate_up = torch.randn(rows, 2 * INTERMEDIATE).bfloat16()
        return {
            "add_rms_norm": lambda _: kernels.add_rms_norm(x, residual, self.norm, 1e-5),
            "qkv": lambda i: packed["qkv"][i].matmul(x),
            "rope_and_cache": lambda i: kernels.rope_and_cache(
                qkv, SHAPE, self.rotary, where, self.kv[i], None
            ),
            "attention": lambda i: kernels.attention(q, SHAPE, where, self.kv[i]),
            "o": lambda i: packed["o"][i].matmul(x),
            "add_rms_norm 2": lambda _: kernels.add_rms_norm(x, residual, self.norm, 1e-5),
            "gate_up": lambda i: packed["gate_up"][i].matmul(x),
            "silu_mul": lambda _: kernels.silu_mul(gate_up),
            "down": lambda i: packed["down"][i].matmul(wide),
        }

    def native_ends(self, rows: int) -> Operations:
        kernels, positions = self.kernels, self.window(rows).positions
        x, token_ids = torch.randn(rows, HIDDEN).bfloat16(), torch.arange(rows) * 47
        logits, seeds = torch.randn(rows, VOCABULARY), torch.arange(rows)
        greedy, warm = torch.zeros(rows), torch.ones(rows)
        return {
            "embedding": lambda _: self.packed_head.rows(token_ids),
            "lm_head": lambda _: self.packed_head.matmul(x, out_dtype=torch.float32),
            "sample T=0": lambda _: kernels.sample(logits, greedy, seeds, positions),
            "sample T=1": lambda _: kernels.sample(logits, warm, seeds, positions),
        }

    def torch_layer(self, rows: int) -> Operations:
        plain, where = self.plain, self.window(rows)
        x, wide = torch.randn(rows, HIDDEN).bfloat16(), torch.randn(rows, INTERMEDIATE).bfloat16()
        q = torch.randn(1, SHAPE.num_heads, rows, SHAPE.head_dim).bfloat16()
        seen = self.context + rows
        visible = torch.arange(seen)[None] <= where.positions[:, None]
        gate_up = torch.randn(rows, 2 * INTERMEDIATE).bfloat16()

        def attention(layer: int) -> Tensor:
            keys, values = (
                cache.transpose(0, 1).flatten(1, 2)[None, :, :seen]
                for cache in (self.kv[layer].keys, self.kv[layer].values)
            )
            return F.scaled_dot_product_attention(
                q, keys, values, attn_mask=visible, enable_gqa=True
            )

        return {
            "qkv": lambda i: F.linear(x, plain["qkv"][i]),
            "attention": attention,
            "o": lambda i: F.linear(x, plain["o"][i]),
            "add_rms_norm": lambda _: F.rms_norm(x + x, (HIDDEN,), self.norm, 1e-5),
            "gate_up": lambda i: F.linear(x, plain["gate_up"][i]),
            "silu_mul": lambda _: F.silu(gate_up[:, :INTERMEDIATE]) * gate_up[:, INTERMEDIATE:],
            "down": lambda i: F.linear(wide, plain["down"][i]),
        }

    def torch_ends(self, rows: int) -> Operations:
        x, logits = torch.randn(rows, HIDDEN).bfloat16(), torch.randn(rows, VOCABULARY)
        return {
            "lm_head": lambda _: F.linear(x, self.head),
            "sample T=0": lambda _: logits.argmax(-1),
        }


def work(name: str, rows: int, context: int) -> tuple[float, float]:
    """Bytes of weights or KV that a call reads, and its floating-point operations."""
    if name == "attention":
        seen = context + rows
        return 4.0 * seen * SHAPE.kv_size, 4.0 * rows * seen * SHAPE.q_size
    n, k = LINEARS.get(name, (VOCABULARY, HIDDEN) if name == "lm_head" else (0, 0))
    return 2.0 * n * k, 2.0 * n * k * rows


def table(model: Model, rows: int, passes: int) -> None:
    native_layer = measure(model.native_layer(rows), LAYERS, passes)
    native_ends = measure(model.native_ends(rows), 1, passes)
    reference = measure(model.torch_layer(rows), LAYERS, passes)
    reference |= measure(model.torch_ends(rows), 1, passes)
    step = LAYERS * sum(native_layer.values())
    step += sum(seconds for name, seconds in native_ends.items() if name != "sample T=1")
    print(f"\n{rows} rows".ljust(18) + "us/call  torch us      GB/s   GFLOP/s   ms/step")
    for name, seconds in (native_layer | native_ends).items():
        moved, flops = work(name, rows, model.context)
        rates = f"{moved / seconds / 1e9:10.1f}{flops / seconds / 1e9:10.1f}" if moved else " " * 20
        torch_time = f"{reference[name] * 1e6:10.1f}" if name in reference else " " * 10
        calls = LAYERS if name in native_layer else 1
        print(f"{name:14}{seconds * 1e6:10.1f}{torch_time}{rates}{seconds * calls * 1e3:10.2f}")
    print(f"{'step, greedy':54}{step * 1e3:10.2f}")


def gated_delta(kernels: Kernels, rows: int) -> Callable[[int], object]:
    """Prepare a layer's pass over committed rows of a slot."""
    rule = RECURRENT.rule
    heads, channels = rule.num_value_heads, rule.conv_channels
    conv = torch.randn(rule.conv_kernel, channels).bfloat16()
    params = GatedDeltaParams(rule, torch.randn(heads), torch.randn(heads), conv, None)
    cache = ModelCache.allocate(
        (RECURRENT,) * NUM_RECURRENT,
        num_blocks=0,
        block_size=1,
        max_num_seqs=1,
        num_drafts=0,
        device=torch.device("cpu"),
    )
    assert cache.folded is not None
    # Not from position 0, where no state is read.
    cache.folded.position.fill_(1)
    qkv, a, b = (
        torch.randn(rows, channels + 2 * heads).bfloat16().split((channels, heads, heads), 1)
    )
    positions = torch.arange(1, rows + 1)
    at = AttentionRows(positions, positions * 0, positions, positions[None])
    running, raw = kernels.begin_pass(at, cache.folded), RawRows(qkv, (a, b))
    return lambda layer: running.run(params, raw, cache.layers[layer])


def recurrent_table(kernels: NativeKernels, row_counts: list[int], passes: int) -> None:
    print("\nGated DeltaNet, Qwen3.5-9B\nrows      us/call  us/row  torch us/row")
    for rows in row_counts:
        native = measure({"": gated_delta(kernels, rows)}, NUM_RECURRENT, passes)[""] * 1e6
        reference = measure({"": gated_delta(ReferenceKernels(), rows)}, 1, 2)[""] * 1e6
        print(f"{rows:<8}{native:9.0f}{native / rows:8.1f}{reference / rows:14.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,8,16,65,256")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--passes", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = Model(options.context)
    print(f"SmolLM2-135M bf16, context {options.context}, {options.threads} threads")
    row_counts = [*map(int, options.rows.split(","))]
    for rows in row_counts:
        table(model, rows, options.passes)
    recurrent_table(model.kernels, row_counts, options.passes)


if __name__ == "__main__":
    main()

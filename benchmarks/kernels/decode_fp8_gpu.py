"""A decode step of Qwen3-8B's shape with float8 layers: products' tiles timed inside it.

    python benchmarks/kernels/decode_fp8_gpu.py [--batches 1,8,64] [--seconds 60]

As ``decode_gpu.py``: one CUDA graph holds the step, here with attention on Hopper and rounding
before each product, and each role's candidates of ``fp8_gpu.py`` replace its default one after the
other; the fastest is kept. ``!`` marks other logits than the defaults'. With ``--seconds 0`` only
the defaults are timed. The head stays in bf16.
"""

from __future__ import annotations

import argparse
import time

import torch
from decode_chain import HIDDEN, ROLES, SHAPE, VOCABULARY, Chain, Choice, Choices, random_layers
from decode_gpu import start_choices
from fp8_gpu import Float8Config, candidates
from gemm_gpu import label, normal
from triton.runtime.errors import OutOfResources

from sametoken.ops.backend import LayerKV
from sametoken.ops.model.attention import hopper
from sametoken.ops.model.gemm.fp8 import Fp8Weight, quantize
from sametoken.ops.model.gemm.fp8_triton import product as float8_product
from sametoken.ops.model.gemm.tuning import StreamedConfig, TritonConfig
from sametoken.ops.triton import device_table

#: Roles of a layer, the largest first.
LAYER_ROLES = ("gate_up", "down", "qkv", "o")
SHOWN = 5


class Float8Chain(Chain):
    """A step whose layers have float8 weights, a scale a row."""

    def __init__(
        self, layers: list, float8: list[dict[str, Fp8Weight]], head: torch.Tensor, batch: int
    ) -> None:
        super().__init__(layers, head, batch, 1)
        self.float8, self.arrived = float8, hopper.counters(head.device)

    def multiply(self, role: str, x: torch.Tensor, index: int, choice: Choice) -> torch.Tensor:
        if role == "head":
            return super().multiply(role, x, index, choice)
        assert isinstance(choice, TritonConfig | StreamedConfig)
        weight = self.float8[index][role]
        return float8_product(x, weight, ROLES[role].epilogue, None, choice)

    def attend(self, q, rows, kv: LayerKV, config: Choice) -> torch.Tensor:
        return hopper.attention(q, SHAPE, rows, kv, self.arrived)


def defaults(batch: int) -> Choices:
    start = start_choices(device_table(), batch, 1)
    return start | {role: candidates(ROLES[role], batch)[0] for role in LAYER_ROLES}


def tune(chain: Float8Chain, seconds: float) -> None:
    """Print the time of the defaults, and of each role's fastest candidates beside the best."""
    best = defaults(chain.batch)
    logits, best_time = chain.step(best).clone(), chain.milliseconds(best)
    print(f"batch {chain.batch}: defaults {best_time:.3f} ms", flush=True)
    deadline = time.time() + seconds
    for role in LAYER_ROLES:
        found: list[tuple[float, str, Float8Config]] = []
        for config in candidates(ROLES[role], chain.batch):
            if time.time() > deadline:
                break
            choices = best | {role: config}
            try:
                wrong = "" if torch.equal(chain.step(choices), logits) else "!"
                found.append((chain.milliseconds(choices), label(config) + wrong, config))
            except OutOfResources:
                continue
        found.sort(key=lambda one: one[0])
        if found and found[0][0] < best_time and not found[0][1].endswith("!"):
            best_time, best = found[0][0], best | {role: found[0][2]}
        shown = ", ".join(f"{name} {milliseconds:.3f}" for milliseconds, name, _ in found[:SHOWN])
        print(f"  {role}: best {best_time:.3f} ms; {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=60, help="for each batch")
    arguments = parser.parse_args()
    layers = random_layers()
    float8 = [
        {role: Fp8Weight(*quantize(matrix)) for role, matrix in layer.matrices.items()}
        for layer in layers
    ]
    for layer in layers:
        layer.matrices.clear()
    head = normal(VOCABULARY, HIDDEN).mul_(HIDDEN**-0.5)
    for batch in map(int, arguments.batches.split(",")):
        tune(Float8Chain(layers, float8, head, batch), arguments.seconds)


if __name__ == "__main__":
    main()

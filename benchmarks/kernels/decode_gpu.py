"""Choose attention configs and GEMM tiles inside a whole decode step of Qwen3-8B's shape.

    python benchmarks/kernels/decode_gpu.py [--variants all|attention|gemm] [--cases 1x1,1x4,...]

First every attention config, alone: its bits against the others', and the time of a layer. Then,
per case (batch x window), one CUDA graph holds the step: stage, embedding, 36 layers of random
weights at a context of 640, logits, keys, verify; for a kernel timed alone does not see what
overlaps with its neighbours. One choice after the other is replaced by its candidates and kept
if the step gets faster. A candidate whose bits differ is shown with ``!`` and never chosen.

Prints what won: the rules of ``ops/model/gemm/tuning.py`` and ``ops/model/attention/tuning.py`` are
drawn from that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from typing import get_args

import torch
from attention_gpu import (
    PREFILL,
    compile_configs,
    configs,
    name_of_config,
    parsed_cases,
    time_configs,
)
from decode_chain import (
    CONTEXT,
    HIDDEN,
    MAX_LEN,
    ROLES,
    SHAPE,
    VOCABULARY,
    Chain,
    Choice,
    Choices,
    Layer,
    random_layers,
)
from gemm_gpu import (
    candidates,
    canonical_rows,
    fits,
    label,
    library_agrees,
    normal,
)
from graph_times import COMPILERS, compile_in_parallel
from triton.runtime.errors import OutOfResources

from sametoken.ops.model.attention.triton import AttentionConfig, choose
from sametoken.ops.model.gemm.product import product
from sametoken.ops.model.gemm.tuning import (
    CublasConfig,
    GemmConfig,
    GemmShape,
    GemmTable,
    Release,
    TritonConfig,
    in_order_config,
    row_bucket,
)
from sametoken.ops.triton import device_table

SMALL_KERNELS = (
    "stage", "embedding", "add_rms_norm", "rope_and_cache", "attention", "keys", "verify",
)  # fmt: skip
#: Bytes of each weight row prefetched into L2 before the previous kernel has finished.
PREFETCHES = (0, 1024, 2048, 4096)
#: The best choice of a product depends on when its neighbours start.
ROUNDS = 2
#: A candidate must beat the best so far by this factor, which exceeds the noise.
GAIN = 0.998


def overlapping(config: GemmConfig, rows: int) -> list[GemmConfig]:
    """The same kernel started early with little or much asked for, and every start of the next."""
    if not isinstance(config, TritonConfig):
        return []
    sizes = PREFETCHES if rows <= 64 else PREFETCHES[:2]
    return [
        dataclasses.replace(config, pdl=False, release="late"),
        *(
            dataclasses.replace(config, pdl=True, release=release, prefetch_bytes=size)
            for size in sizes
            for release in get_args(Release)
        ),
    ]


def name_of(choice: Choice) -> str:
    return name_of_config(choice) if isinstance(choice, AttentionConfig) else label(choice)


def start_choices(table: GemmTable, batch: int, window: int) -> Choices:
    rows = batch * window
    found: Choices = {role: table.choose(shape, rows) for role, shape in ROLES.items()}
    found["attention"] = choose(batch, window, SHAPE, MAX_LEN, torch.bfloat16)
    return found


def gemms(shape: GemmShape, rows: int) -> list[GemmConfig]:
    return candidates(shape, row_bucket(rows))


class Tuner:
    """Coordinate descent over one chain's choices, within a time limit."""

    def __init__(self, chain: Chain, start: Choices, seconds: float) -> None:
        self.chain, self.deadline = chain, time.time() + seconds
        self.notes: list[str] = []
        self.inputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.best = dict(start)
        for key, shape in ROLES.items():
            if not self.agrees(key, start[key]):
                self.best[key] = in_order_config(shape, chain.rows, hopper=True)
        self.logits = chain.step(self.best).clone()
        self.best_time = chain.milliseconds(self.best)

    @property
    def out_of_time(self) -> bool:
        return time.time() > self.deadline

    def agrees(self, key: str, choice: Choice) -> bool:
        """Return whether a choice keeps the canonical bits; for attention, those of the step."""
        if key == "attention":
            return torch.equal(self.chain.step(self.best | {key: choice}), self.logits)
        shape = ROLES[key]
        matrix = self.chain.head if key == "head" else self.chain.layers[0].matrices[key]
        if key not in self.inputs:
            x = normal(self.chain.rows, shape.in_features)
            self.inputs[key] = x, canonical_rows(x, matrix, shape)
        x, expected = self.inputs[key]
        if isinstance(choice, CublasConfig):
            return library_agrees(x, matrix, shape, self.chain.rows, expected)
        return torch.equal(product(choice, x, matrix, shape.epilogue), expected)

    def attempt(self, key: str, choice: Choice) -> None:
        """Keep the choice if the bits stay the same and the step gets faster."""
        if self.out_of_time or choice == self.best[key]:
            return
        tried = self.best | {key: choice}
        try:
            if not self.agrees(key, choice):
                self.notes.append(f"{name_of(choice)}!")
                return
            elapsed = self.chain.milliseconds(tried)
        except OutOfResources:
            return
        self.notes.append(f"{name_of(choice)} {1e3 * (elapsed - self.best_time):+.0f}")
        if elapsed < self.best_time * GAIN:
            self.best, self.best_time = tried, elapsed

    def tune(self, key: str, choices: list[Choice]) -> None:
        before, self.notes = self.best[key], []
        for choice in choices:
            self.attempt(key, choice)
        chosen = self.best[key]
        if not isinstance(chosen, AttentionConfig):
            for choice in overlapping(chosen, self.chain.rows):
                self.attempt(key, choice)
        print(
            f"  {key}: {name_of(before)} -> {name_of(self.best[key])}; us a step, from the best "
            f"so far: {', '.join(self.notes)}"
        )


def run_case(
    layers: list[Layer], head: torch.Tensor, table: GemmTable, case: tuple[int, int],
    options: argparse.Namespace,
) -> AttentionConfig:  # fmt: skip
    """Tune and print one case; the attention config that won."""
    batch, window = case
    chain = Chain(layers, head, batch, window)
    tuner = Tuner(chain, start_choices(table, batch, window), options.seconds)
    before = tuner.best_time
    print(f"\nbatch {batch} window {window}: {before:.3f} ms/step with the choices of today")
    if options.variants != "gemm":
        tuner.tune("attention", [*configs(SHAPE, window)])
    for _ in range(ROUNDS if options.variants != "attention" else 0):
        for key in ("o", "gate_up", "down", "qkv", "head"):
            tuner.tune(key, [*gemms(ROLES[key], chain.rows)])
    if tuner.out_of_time:
        print("  out of time: not all candidates were tried")
    best, after = tuner.best, tuner.best_time
    print(f"  {before:.3f} -> {after:.3f} ms/step ({before / after - 1:+.1%})")
    costs = [
        f"{key} {after - chain.milliseconds(best, key):.3f}" for key in (*ROLES, *SMALL_KERNELS)
    ]
    print(f"  ms saved when left out: {', '.join(costs)}", flush=True)
    won = best["attention"]
    assert isinstance(won, AttentionConfig)
    return won


def compile_share(index: int, cases: list[tuple[int, int]], variants: str) -> None:
    """Compile one share of all kernels into Triton's cache, in a separate process."""
    jobs: dict[tuple, tuple[GemmConfig, GemmShape]] = {}
    for shape in ROLES.values() if variants != "attention" else ():
        for batch, window in cases:
            for base in gemms(shape, batch * window):
                if isinstance(base, TritonConfig) and not fits(base, shape):
                    continue
                for config in (base, *overlapping(base, batch * window)[:2]):
                    jobs[config, shape.epilogue] = config, shape
    for config, shape in list(jobs.values())[index::COMPILERS]:
        features = 1024 if shape.epilogue == "silu_mul" else 512
        x, matrix = normal(1, shape.in_features), normal(features, shape.in_features)
        with contextlib.suppress(OutOfResources):
            product(config, x, matrix, shape.epilogue)
    if variants != "gemm":
        compile_configs(SHAPE, [*cases, *PREFILL], index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", choices=("all", "attention", "gemm"), default="all")
    parser.add_argument("--cases", default="1x1,1x4,8x1,8x4,64x1,64x4")
    parser.add_argument("--seconds", type=float, default=20, help="seconds of tuning per case")
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    cases = parsed_cases(options.cases)
    if options.compile is not None:
        compile_share(options.compile, cases, options.variants)
        return
    begun = time.time()
    compile_in_parallel()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; compiled in {time.time() - begun:.0f} s")
    if options.variants != "gemm":
        time_configs(SHAPE, [*cases, *PREFILL], CONTEXT)
    table = device_table()
    layers, head = random_layers(), normal(VOCABULARY, HIDDEN).mul_(HIDDEN**-0.5)
    winners = {}
    for case in cases:
        winners[case] = run_case(layers, head, table, case, options)
        torch.cuda.empty_cache()
    print("\nfor LIGHT of ops/model/attention/tuning.py:")
    for (batch, window), config in winners.items():
        print(f"  {batch}x{window}: {config}")
    print(f"done after {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()

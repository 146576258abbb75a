"""Tune GEMM and attention launches inside a whole decode step of Qwen3-8B's shape.

    python benchmarks/chain_gpu.py [--cases 1x1,1x4,8x4,64x1,64x4,64x6] [--out DIR]

A kernel timed alone does not see what overlaps with its neighbours. Here one CUDA graph holds
the step: stage, embedding, 36 layers of random weights at a context of 530, logits, keys,
judge. Per case (batch x window), one choice after the other is replaced by candidates and kept
if the whole step gets faster. Every candidate must give the start's logits bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from decode_chain import (
    BLOCK_SIZE,
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
from gemm_gpu import label, library_agrees, normal
from triton.runtime.errors import OutOfResources

from sametoken.kernels.attention.triton import AttentionConfig, attention, choose
from sametoken.kernels.gemm.triton import product
from sametoken.kernels.gemm.tuning import (
    CublasConfig,
    GemmConfig,
    GemmShape,
    TritonConfig,
    TuningTable,
    load_table,
    row_bucket,
    table_name,
)
from sametoken.kernels.interface import AttentionRows, LayerKV

SMALL_KERNELS = (
    "stage",
    "embedding",
    "add_rms_norm",
    "rope_and_cache",
    "attention",
    "keys",
    "judge",
)
PREFETCHES = (0, 1024, 4096)
COMPILERS = 14
#: A candidate must beat the best so far by this factor, which noise does not.
GAIN = 0.998

T = TritonConfig
BASES = {
    16: (
        T(16, 64, 128, 4, 3), T(16, 64, 128, 4, 5), T(16, 32, 256, 4, 3),
        T(16, 32, 256, 4, 4, tma=True), T(16, 64, 256, 4, 3, tma=True),
    ),
    32: (
        T(32, 64, 128, 4, 3), T(32, 64, 128, 4, 4), T(32, 64, 128, 4, 5, tma=True),
        T(32, 128, 64, 4, 5, tma=True), T(32, 32, 128, 4, 5, tma=True),
    ),
    64: (
        T(64, 64, 128, 4, 3), T(64, 64, 128, 4, 4, tma=True), T(64, 128, 64, 4, 4, tma=True),
        T(32, 64, 128, 4, 4, tma=True),
    ),
    1 << 30: (
        T(64, 64, 128, 4, 4, tma=True), T(128, 64, 64, 4, 5, tma=True),
        T(128, 128, 64, 8, 4, tma=True), T(256, 128, 64, 8, 3, tma=True),
    ),
}  # fmt: skip


def bases(shape: GemmShape, rows: int) -> list[TritonConfig]:
    found = next(configs for limit, configs in BASES.items() if rows <= limit)
    wide = shape.epilogue == "silu_mul"
    return [c for c in found if not wide or c.block_rows * c.block_features <= 1 << 14]


def overlapping(config: TritonConfig, rows: int) -> list[TritonConfig]:
    """The same kernel started early, with little or much asked for meanwhile."""
    sizes = PREFETCHES if rows <= 64 else PREFETCHES[:2]
    return [dataclasses.replace(config, overlap=True, prefetch_bytes=size) for size in sizes]


def attention_choices(window: int) -> list[AttentionConfig]:
    queries = (16, 32) if window * SHAPE.num_heads // SHAPE.num_kv_heads > 16 else (16,)
    return [
        AttentionConfig(spread, size, 4, stages)
        for spread in (True, False)
        for size in queries
        for stages in (3, 5)
    ]


def name_of(choice: Choice) -> str:
    if isinstance(choice, AttentionConfig):
        form = "spread" if choice.spread else "walk"
        return f"{form} q{choice.block_queries} w{choice.num_warps} s{choice.num_stages}"
    return label(choice)


def start_choices(table: TuningTable, batch: int, window: int) -> Choices:
    rows = batch * window
    found: Choices = {role: table.choose(shape, rows) for role, shape in ROLES.items()}
    room = MAX_LEN // BLOCK_SIZE * BLOCK_SIZE
    found["attention"] = choose(rows, SHAPE, window, room, torch.bfloat16)
    return found


def candidates(key: str, rows: int, window: int) -> list[Choice]:
    if key == "attention":
        return [*attention_choices(window)]
    plain = bases(ROLES[key], rows)
    return [CublasConfig(), *plain, *(overlapping(config, rows)[0] for config in plain)]


def agrees(chain: Chain, key: str, choice: Choice, choices: Choices, logits: torch.Tensor) -> bool:
    """Whether the step with this choice gives the same logits, bit for bit."""
    if isinstance(choice, CublasConfig):
        shape = ROLES[key]
        matrix = chain.head if key == "head" else chain.layers[0].matrices[key]
        x = normal(chain.rows, shape.in_features)
        expected = torch.cat(
            [product(T(16, 32, 128, 4, 4), part, matrix, shape.epilogue) for part in x.split(16)]
        )
        if not library_agrees(x, matrix, shape, chain.rows, expected):
            return False
    return torch.equal(chain.step(choices | {key: choice}), logits)


class Tuner:
    """Coordinate descent over one chain's choices, within a time limit."""

    def __init__(self, chain: Chain, start: Choices, seconds: float) -> None:
        self.chain, self.deadline = chain, time.time() + seconds
        self.logits = chain.step(start).clone()
        self.best, self.best_time = dict(start), chain.milliseconds(start)
        self.notes: list[str] = []

    @property
    def out_of_time(self) -> bool:
        return time.time() > self.deadline

    def attempt(self, key: str, choice: Choice) -> None:
        """Keep the choice if the logits stay the same and the step gets faster."""
        if self.out_of_time or choice == self.best[key]:
            return
        tried = self.best | {key: choice}
        try:
            if not agrees(self.chain, key, choice, self.best, self.logits):
                self.notes.append(f"{name_of(choice)} other bits")
                return
            elapsed = self.chain.milliseconds(tried)
        except OutOfResources:
            return
        self.notes.append(f"{name_of(choice)} {elapsed:.3f}")
        if elapsed < self.best_time * GAIN:
            self.best, self.best_time = tried, elapsed

    def tune(self, key: str) -> None:
        before, self.notes = self.best[key], []
        for choice in candidates(key, self.chain.rows, self.chain.window):
            self.attempt(key, choice)
        chosen = self.best[key]
        if isinstance(chosen, TritonConfig):
            for choice in overlapping(chosen, self.chain.rows):
                self.attempt(key, choice)
        print(f"  {key}: {name_of(before)} -> {name_of(self.best[key])}; {', '.join(self.notes)}")


def run_case(
    layers: list[Layer],
    head: torch.Tensor,
    table: TuningTable,
    case: tuple[int, int],
    seconds: float,
) -> TuningTable:
    batch, window = case
    chain = Chain(layers, head, batch, window)
    start = start_choices(table, batch, window)
    begun = time.time()
    before = chain.milliseconds(start)
    print(f"\nbatch {batch} window {window}: {before:.3f} ms/step with the table's choices")
    tuner = Tuner(chain, start, seconds)
    for key in ("gate_up", "down", "qkv", "o", "attention", "head"):
        tuner.tune(key)
    if tuner.out_of_time:
        print("  out of time: not all candidates were tried")
    best = tuner.best
    after = chain.milliseconds(best)
    print(f"  {before:.3f} -> {after:.3f} ms/step ({before / after - 1:+.1%})")
    costs = [
        f"{key} {after - chain.milliseconds(best, key):.3f}" for key in (*ROLES, *SMALL_KERNELS)
    ]
    print(f"  ms saved when left out: {', '.join(costs)}")
    print(f"  case took {time.time() - begun:.0f} s", flush=True)
    for role, shape in ROLES.items():
        table = with_choice(table, shape, chain.rows, best[role])
    return table


def with_choice(table: TuningTable, shape: GemmShape, rows: int, config: GemmConfig) -> TuningTable:
    table = table.replaced(shape, row_bucket(rows), config)
    if shape.epilogue == "none":
        added = dataclasses.replace(shape, epilogue="add")
        table = table.replaced(added, row_bucket(rows), config)
    return table


def compile_share(index: int, cases: list[tuple[int, int]]) -> None:
    """Compile one share of all kernels into Triton's cache; run in its own process."""
    jobs: dict[tuple, tuple[TritonConfig, GemmShape]] = {}
    for shape in ROLES.values():
        for batch, window in cases:
            for base in bases(shape, batch * window):
                for config in (base, *overlapping(base, batch * window)):
                    jobs[config, shape.epilogue] = config, shape
    for config, shape in list(jobs.values())[index::COMPILERS]:
        features = 1024 if shape.epilogue == "silu_mul" else 512
        x, matrix = normal(1, shape.in_features), normal(features, shape.in_features)
        with contextlib.suppress(OutOfResources):
            product(config, x, matrix, shape.epilogue)
    cuts = dict.fromkeys((w, c) for w in (1, 6) for c in attention_choices(w))
    for window, config in list(cuts)[index::COMPILERS]:
        compile_attention(window, config)


def compile_attention(window: int, config: AttentionConfig) -> None:
    at = torch.arange(window, device="cuda")
    table = torch.zeros(2, MAX_LEN // BLOCK_SIZE, dtype=torch.int64, device="cuda")
    memory = normal(2, 1, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
    q = normal(window, SHAPE.num_heads, SHAPE.head_dim)
    rows = AttentionRows(at, torch.zeros_like(at), at, table)
    attention(q, SHAPE, rows, LayerKV(memory[0], memory[1]), window=window, config=config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="1x1,1x4,8x4,64x1,64x4,64x6")
    parser.add_argument("--seconds", type=float, default=22, help="of tuning per case")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--compile", type=int, default=None, help="share to compile, then exit")
    options = parser.parse_args()
    sizes = (case.split("x") for case in options.cases.split(","))
    cases = [(int(batch), int(window)) for batch, window in sizes]
    if options.compile is not None:
        compile_share(options.compile, cases)
        return
    begun = time.time()
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--compile", str(index)])
        for index in range(COMPILERS)
    ]
    for worker in workers:
        worker.wait()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; compiled in {time.time() - begun:.0f} s")
    table = load_table(device)
    layers, head = random_layers(), normal(VOCABULARY, HIDDEN).mul_(HIDDEN**-0.5)
    path = options.out / table_name(device)
    for case in cases:
        table = run_case(layers, head, table, case, options.seconds)
        path.write_text(table.to_json())
        torch.cuda.empty_cache()
    print(f"wrote {path} after {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()

"""Microseconds per launch of the small kernels inside a CUDA graph.

    python benchmarks/kernels/small_kernels_gpu.py [--no-overlap] [--json FILE]

Each figure is one launch in a chain of equal launches, so it includes the gap between two
dependent kernels. Operands up to the size of L2 stay there, as most do in a real step. Kernels of
layers have prompts' rows too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from sametoken.ops import pdl
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    LayerKV,
    QKNorm,
    RotaryTable,
    Routing,
)
from sametoken.ops.lookup.ngram_triton import lookup
from sametoken.ops.model.activation_triton import silu_mul
from sametoken.ops.model.embedding_triton import embedding
from sametoken.ops.model.gemm.fp8_triton import rounded
from sametoken.ops.model.moe_gate_triton import moe_gate
from sametoken.ops.model.moe_rows_triton import RowGroups, combine
from sametoken.ops.model.norm_triton import add_rms_norm, rms_norm
from sametoken.ops.model.rope_triton import rope_and_cache
from sametoken.ops.sampling import sample_triton as sampling
from sametoken.ops.sampling.logits_rules import Truncation
from sametoken.ops.sampling.logits_rules_triton import apply_rules
from sametoken.ops.sampling.truncation_triton import truncate
from sametoken.ops.step import triton as step
from sametoken.ops.step.types import LayoutTable
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.types.layout import StepLayout
from sametoken.types.plan import Admission, ScheduledRequest, StepPlan
from sametoken.types.sampling_params import SamplingParams

ROW_COUNTS = (1, 4, 32, 64, 256, 384)
#: Of a layer's kernels, which prompts have too.
LAYER_ROW_COUNTS = (*ROW_COUNTS, 4096, 8192)
LAUNCHES, REPLAYS = 20, 10
MAX_LEN = 32768
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    intermediate: int
    vocabulary: int
    shape: AttentionShape
    qk_norm: bool
    #: All of a layer, and those that a row chooses; ``intermediate`` is of one.
    experts: tuple[int, int] | None = None


MODELS = (
    Model("Qwen3-8B", 4096, 12288, 151936, AttentionShape(32, 8, 128), True),
    Model("SmolLM2-135M", 576, 1536, 49152, AttentionShape(9, 3, 64), False),
    Model("Qwen3-30B-A3B", 2048, 768, 151936, AttentionShape(32, 4, 128), True, (128, 8)),
)


#: Nothing to do; an edge among a row's leaders; one below them, where nearly all is kept.
TRUNCATIONS = (
    ("truncate none", 0, 1.0),
    ("truncate 20 0.95", 20, 0.95),
    ("truncate all", 0, 1 - 1e-9),
)


#: Options of every request. Penalties cover half of MAX_LEN tokens.
RULES = {
    "bad words": SamplingParams(temperature=0.0),
    "100 biases": SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(100), 0.1)),
    "100 allowed": SamplingParams(temperature=0.0, allowed_token_ids=range(100)),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1),
}


def truncation_of(temperature: torch.Tensor, top_k: int, top_p: float) -> Truncation:
    every = temperature.double()
    return Truncation(temperature, (every * 0 + top_k).long(), every * 0 + top_p, every * 0)


def microseconds(launch: Callable[[], object]) -> float:
    """Time one launch in a graph of LAUNCHES launches."""
    # On the stream that fills the inputs: another one could read ids before they are written.
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(1000 * start.elapsed_time(end) / (LAUNCHES * REPLAYS))


def noise(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def layer_launches(model: Model, rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    shape = model.shape
    x, residual, weight = noise(rows, model.hidden), noise(rows, model.hidden), noise(model.hidden)
    yield "rms_norm", lambda: rms_norm(x, weight, 1e-6)
    yield "add_rms_norm", lambda: add_rms_norm(x, residual, weight, 1e-6)
    yield "round", lambda: rounded(x)
    if model.experts is None:
        gate_up = noise(rows, 2 * model.intermediate)
        yield "silu_mul", lambda: silu_mul(gate_up)
    else:
        yield from expert_launches(model, rows, *model.experts)
    matrix = noise(model.vocabulary, model.hidden)
    token_ids = torch.randint(0, model.vocabulary, (rows,), device="cuda")
    yield "embedding", lambda: embedding(token_ids, matrix)

    qkv = noise(rows, shape.q_size + 2 * shape.kv_size)
    half = shape.head_dim // 2
    rotary = RotaryTable(noise(4096, half, dtype=torch.float32), noise(4096, half).float())
    positions = torch.arange(rows, device="cuda")
    at = AttentionRows(positions, positions, positions, positions[None])
    memory = noise(2, -(-rows // 16), shape.num_kv_heads, 16, shape.head_dim)
    kv = LayerKV(memory[0], memory[1])
    norm = QKNorm(noise(shape.head_dim), noise(shape.head_dim), 1e-6) if model.qk_norm else None
    yield "rope_and_cache", lambda: rope_and_cache(qkv, shape, rotary, at, kv, norm)


def expert_launches(
    model: Model, rows: int, num_experts: int, top_k: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the kernels of a mixture that multiply nothing."""
    logits, routing = noise(rows, num_experts, dtype=torch.float32), Routing(top_k, True)
    chosen, weights = moe_gate(logits, routing)
    yield "moe_gate", lambda: moe_gate(logits, routing)
    yield "group", lambda: RowGroups.of(chosen, num_experts)
    inner, outputs = noise(rows * top_k, model.intermediate), noise(rows * top_k, model.hidden)
    yield "round experts", lambda: rounded(inner)
    out = noise(rows, model.hidden)
    yield "combine", lambda: combine(outputs, weights, out)


def step_launches(model: Model, rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the kernels that run once per step, with k = 3 if the rows allow windows."""
    k = 3 if rows >= 4 else 0
    batch = rows // (k + 1)
    sequences = Sequences.allocate(
        max_num_seqs=batch,
        max_len=MAX_LEN,
        num_drafts=k,
        block_size=16,
        reserved_block=MAX_LEN // 16,
        device=torch.device("cuda"),
    )
    sequences.token_ids.random_(0, model.vocabulary)
    sequences.num_tokens[:batch] = MAX_LEN // 2
    sequences.num_drafts[:batch] = k
    slots = torch.arange(batch, device="cuda")
    layout = StepLayout.of(
        StepPlan(1, requests=tuple(ScheduledRequest(b, 1, k, True) for b in range(batch)))
    )
    columns = layout.table(layout.shape, sequences.reserved_slot, 0)
    windows = LayoutTable(torch.tensor(columns, device="cuda"), layout.shape)
    x = step.prepare_inputs(sequences, windows)
    yield "prepare_inputs", lambda: step.prepare_inputs(sequences, windows)

    logits = noise(rows, model.vocabulary, dtype=torch.float32)
    temperature, seeds = torch.ones(batch + 1, device="cuda"), torch.arange(batch + 1).cuda()
    at, greedy = x.sampled, torch.zeros_like(temperature)
    yield "keys greedy", lambda: sampling.token_keys(logits, greedy, seeds, at)
    yield (
        "keys sampled",
        lambda: sampling.token_keys(logits, temperature, seeds, at),
    )
    for name, top_k, top_p in TRUNCATIONS:
        truncation, truncated = truncation_of(temperature, top_k, top_p), logits.clone()
        yield (
            name,
            lambda truncation=truncation, truncated=truncated: truncate(
                truncated, at.slots, truncation
            ),
        )
    for name, params in RULES.items():
        table, ruled = SamplingTable.allocate(batch, torch.device("cuda")), logits.clone()
        for slot in range(batch):
            table.admit(Admission(slot, (1,), 0, params, (2,), ((1, 2), (3, 4, 5))))
        yield (
            f"rules {name}",
            lambda ruled=ruled, table=table: apply_rules(ruled, at, sequences, table.rules),
        )
    keys = sampling.token_keys(logits, greedy, seeds, at)
    verdict = step.verify(keys, x)
    yield "verify", lambda: step.verify(keys, x)
    decided = verdict.num_accepted, verdict.next_token
    yield "commit", lambda: step.commit(sequences, x, *decided)
    if k:
        lengths = torch.full_like(slots, MAX_LEN // 2)
        tokens = sequences.token_ids
        yield (
            "lookup (2)",
            lambda: lookup(tokens, slots, lengths, min_length=2, max_length=10, k=k),
        )
        drafts = lookup(tokens, slots, lengths, min_length=2, max_length=10, k=k)
        yield "publish", lambda: step.publish(sequences, x, *drafts)


def measured(model: Model) -> dict[str, dict[int, float]]:
    table: dict[str, dict[int, float]] = {}
    for launches, row_counts in ((layer_launches, LAYER_ROW_COUNTS), (step_launches, ROW_COUNTS)):
        for rows in row_counts:
            for name, launch in launches(model, rows):
                try:
                    table.setdefault(name, {})[rows] = microseconds(launch)
                except OutOfResources as error:
                    print(f"{model.name}, {rows} rows: {name} does not fit: {error}", flush=True)
                except torch.AcceleratorError as error:
                    # The error destroys the CUDA context, so nothing more can be timed.
                    raise SystemExit(f"{model.name}, {rows} rows: {name} failed: {error}") from None
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--no-overlap", action="store_true", help="disable programmatic dependent launch"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.no_overlap:
        pdl.supports_pdl = lambda tensor: False
    results = {}
    print(f"{torch.cuda.get_device_name()}, us per launch in a graph")
    for model in MODELS:
        results[model.name] = measured(model)
        row_counts = LAYER_ROW_COUNTS
        print(f"\n{model.name:18}" + "".join(f"{f'T={rows}':>9}" for rows in row_counts))
        for name, figures in results[model.name].items():
            cells = (f"{figures[rows]:9.2f}" if rows in figures else 9 * " " for rows in row_counts)
            print(f"{name:18}" + "".join(cells))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

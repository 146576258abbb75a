"""Microseconds of a recurrent layer's operation over prompts in a CUDA graph, by form.

    python benchmarks/kernels/recurrent_chunks.py [gated_delta | mamba2]

Gated DeltaNet in Qwen3.5-9B's shape (32 value heads over 16 key heads, states of 128 x 128), or
Mamba-2 in Nemotron-3-Nano's (64 heads of 64 in 8 groups, a state of 128). Prompts go on from
position 64, walked and by the chunks of ``fast_prompts_from``; these by kernel, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from graph_times import microseconds
from torch.profiler import ProfilerActivity, profile

from sametoken.ops.backend import AttentionRows, FastPrompts, RowRuns
from sametoken.ops.model.gated_delta_rule import triton as gated_delta_rule
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.mamba2 import triton as mamba2
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.model.recurrent.rule import FAST_ROWS, STATE_STRIDE, Folded, LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import Runs, plan_runs

RULES = {"gated_delta": GatedDelta(16, 32, 128, 128, 4), "mamba2": Mamba2(64, 64, 8, 128, 4)}
CASES = ([1024], [4096], [8192], [512] * 8)
CALLS = 20


def planned(lengths: list[int], *, by_chunks: bool) -> Runs:
    """A pass over prompts of these lengths, each in a slot of its own."""
    device, starts = torch.device("cuda"), [*accumulate(lengths, initial=0)]
    slots = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device) + FAST_ROWS
    runs = RowRuns(len(lengths), max(lengths), torch.tensor(starts, device=device), 0, 0)
    longest = max(lengths) + FAST_ROWS
    prompts = FastPrompts(torch.full((len(lengths) + 1,), longest, device=device), 1)
    fast = prompts if by_chunks else None
    rows = AttentionRows(positions, slots, positions, positions[None], runs, fast_prompts=fast)
    before = torch.full((len(lengths) + 1,), FAST_ROWS, device=device)
    return plan_runs(rows, Folded(before, torch.zeros_like(before), 3, STATE_STRIDE))


def by_kernel(operation: Callable[[], object]) -> str:
    """Of one call, by the profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            operation()
        torch.cuda.synchronize()
    events = [event for event in found.key_averages() if event.key.endswith("_kernel")]
    return ", ".join(f"{event.key.strip('_')} {event.device_time:.0f}" for event in events)


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, device="cuda").to(dtype)


def layer_of(rule: GatedDelta | Mamba2) -> Callable[..., torch.Tensor]:
    """The operation, of a plan, raw rows and memory."""
    weight, heads = random(rule.conv_kernel, rule.conv_channels), rule.gate_sizes[0]
    if isinstance(rule, GatedDelta):
        delta = GatedDeltaParams(rule, random(heads) - 3, random(heads), weight, None)
        return lambda plan, raw, memory: gated_delta_rule.advance(plan, delta, raw, memory)
    scan = Mamba2Params(rule, random(heads) - 3, random(heads), random(heads), weight, None)
    return lambda plan, raw, memory: mamba2.advance(plan, scan, raw, memory)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rule", nargs="?", choices=RULES, default="gated_delta")
    rule = RULES[parser.parse_args().rule]
    torch.manual_seed(0)
    advance, channels = layer_of(rule), rule.conv_channels
    for lengths in CASES:
        gates = tuple(random(sum(lengths), width) for width in rule.gate_sizes)
        raw, slots = RawRows(random(sum(lengths), channels), gates), len(lengths) + 1
        memory = LayerMemory(
            random(slots, *rule.state_shape, dtype=torch.float32),
            random(slots, rule.conv_kernel - 1, channels),
            random(slots, 3, channels),
            random(slots, 3, sum(rule.gate_sizes)),
        )
        walk, chunks = (
            partial(advance, planned(lengths, by_chunks=by_chunks), raw, memory)
            for by_chunks in (False, True)
        )
        times = [
            microseconds(lambda once: once(), [operation] * CALLS) for operation in (walk, chunks)
        ]
        print(f"{len(lengths)} x {lengths[0]}: walked {times[0]:.0f}, by chunks {times[1]:.0f}")
        print(f"    {by_kernel(chunks)}", flush=True)


if __name__ == "__main__":
    main()

"""Microseconds of Gated DeltaNet's layer operation over prompts in a CUDA graph, by form.

    python benchmarks/kernels/gated_delta_chunks.py

Qwen3.5-9B's shape: 32 value heads over 16 key heads, states of 128 x 128. Prompts go on from
position 64, walked and by the chunks of ``fast_prompts_from``; these by kernel, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from graph_times import microseconds
from torch.profiler import ProfilerActivity, profile

from sametoken.ops.backend import AttentionRows, FastPrompts, RowRuns
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.gated_delta_rule.triton import advance
from sametoken.ops.model.recurrent.rule import FAST_ROWS, STATE_STRIDE, Folded, LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import Runs, plan_runs

RULE = GatedDelta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_kernel=4)
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


def main() -> None:
    """Print a line for each case."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    channels, heads = RULE.conv_channels, RULE.num_value_heads
    params = GatedDeltaParams(
        RULE, random(heads) - 3, random(heads), random(RULE.conv_kernel, channels), None
    )
    for lengths in CASES:
        raw = RawRows(random(sum(lengths), channels), (random(sum(lengths), heads),) * 2)
        slots = len(lengths) + 1
        memory = LayerMemory(
            random(slots, *RULE.state_shape, dtype=torch.float32),
            random(slots, RULE.conv_kernel - 1, channels),
            random(slots, 3, channels),
            random(slots, 3, 2 * heads),
        )
        walk, chunks = (
            partial(advance, planned(lengths, by_chunks=by_chunks), params, raw, memory)
            for by_chunks in (False, True)
        )
        times = [
            microseconds(lambda once: once(), [operation] * CALLS) for operation in (walk, chunks)
        ]
        print(f"{len(lengths)} x {lengths[0]}: walked {times[0]:.0f}, by chunks {times[1]:.0f}")
        print(f"    {by_kernel(chunks)}", flush=True)


if __name__ == "__main__":
    main()

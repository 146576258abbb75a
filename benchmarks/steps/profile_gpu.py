"""Profile of a captured decode step, or of prompts: kernels by name, from torch's profiler.

    python benchmarks/steps/profile_gpu.py MODEL CONCURRENCY [SPECULATIVE_JSON | prompts[:TOKENS]]

Dummy weights; 512 tokens in, or TOKENS. ``prompts`` profiles the steps that compute all prompts, in
rows of the default budget, after a first round of them. With programmatic dependent launch a kernel
starts early and waits for the earlier ones; that wait does not count. A kernel's time runs from the
end of all earlier kernels to its own end. Prints the microseconds per step by kernel and its
predecessor; they add up to the step. Idle is the time in which no kernel runs.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import defaultdict

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams

STEPS = 20
SHOWN = 48


def own_times(spans: list[FunctionEvent]) -> dict[tuple[str, str], list[float]]:
    """Return microseconds from the predecessor's end to the kernel's end, by kernel and both."""
    own: dict[tuple[str, str], list[float]] = defaultdict(list)
    before, latest = "", min(event.time_range.start for event in spans)
    for event in sorted(spans, key=lambda event: event.time_range.end):
        own[event.name, before].append(event.time_range.end - latest)
        before, latest = event.name, event.time_range.end
    return own


def idle_time(spans: list[FunctionEvent]) -> float:
    """Return the microseconds in which no kernel runs."""
    idle, latest = 0.0, min(event.time_range.start for event in spans)
    for event in sorted(spans, key=lambda event: event.time_range.start):
        idle += max(0.0, event.time_range.start - latest)
        latest = max(latest, event.time_range.end)
    return idle


def add_requests(
    core: EngineCore, name: str, count: int, max_tokens: int, num_tokens: int = 512
) -> None:
    """Queue ``count`` random prompts."""
    rng = random.Random(name)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    for i in range(count):
        prompt = tuple(rng.randrange(1000, 100_000) for _ in range(num_tokens))
        core.add_request(EngineRequest(f"{name}{i}", prompt, params, num_tokens + max_tokens))


def finish(core: EngineCore) -> int:
    """Run every request to its first token; returns the number of steps."""
    steps = 0
    while core.has_unfinished:
        for update in core.step():
            if update.token_ids:
                core.release(update.request_id)
        steps += 1
    torch.cuda.synchronize()
    return steps


def main() -> None:
    model, concurrency = sys.argv[1], int(sys.argv[2])
    third = sys.argv[3] if len(sys.argv) > 3 else None
    of_prompts = third is not None and third.startswith("prompts")
    num_tokens = int((third or "").partition("prompts:")[2] or 512)
    options = {} if third is None or of_prompts else {"speculative_config": third}
    if not of_prompts:
        options["max_num_batched_tokens"] = 8192
    core = build_engine(
        EngineConfig.from_options(
            model=model, load_format="dummy", max_model_len=max(2048, num_tokens + 64),
            kv_cache_memory_bytes=9126805504, max_num_seqs=concurrency,
            enable_prefix_caching=False, **options,
        )
    )  # fmt: skip
    add_requests(core, "first", concurrency, 1 if of_prompts else 1000, num_tokens)
    if of_prompts:
        finish(core)
        add_requests(core, "second", concurrency, 1, num_tokens)
    else:
        for _ in range(30):
            core.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        if of_prompts:
            steps = finish(core)
        else:
            steps = STEPS
            for _ in range(STEPS):
                core.step()
            torch.cuda.synchronize()
    report(recorded, steps)


def report(recorded: profile, steps: int) -> None:
    """Print the kernels of ``steps`` steps."""
    spans = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    first = min(e.time_range.start for e in spans)
    last = max(e.time_range.end for e in spans)
    print(
        f"{(last - first) / steps / 1e3:.3f} ms a step of {steps}, {len(spans) / steps:.0f} "
        f"kernels, idle {idle_time(spans) / steps / 1e3:.3f} ms"
    )
    own = own_times(spans)
    for (name, before), times in sorted(own.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        calls, each = len(times) / steps, statistics.median(times)
        print(
            f"{sum(times) / steps:9.1f} us {calls:6.1f} x {each:7.1f}"
            f"  {name[:60]}, behind {before[:60]}"
        )


if __name__ == "__main__":
    main()

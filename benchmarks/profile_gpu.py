"""Where a captured decode step goes: kernels by name, from torch's profiler.

    python benchmarks/profile_gpu.py MODEL CONCURRENCY [SPECULATIVE_JSON]

Dummy weights; 512 tokens in. Prints microseconds a step by kernel, and the idle rest.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from sametoken.config import EngineConfig
from sametoken.core.request import EngineRequest
from sametoken.core.sampling_params import SamplingParams
from sametoken.engine.build import build_engine

STEPS = 20


def gaps(spans: list[FunctionEvent]) -> Counter[tuple[str, str]]:
    """Microseconds in which nothing ran, by the names of what ran before and after."""
    idle: Counter[tuple[str, str]] = Counter()
    ordered = sorted(spans, key=lambda event: event.time_range.start)
    latest = ordered[0]
    for event in ordered[1:]:
        if event.time_range.start > latest.time_range.end:
            idle[latest.name, event.name] += event.time_range.start - latest.time_range.end
        if event.time_range.end > latest.time_range.end:
            latest = event
    return idle


def main() -> None:
    model, concurrency = sys.argv[1], int(sys.argv[2])
    options = {"speculative_config": sys.argv[3]} if len(sys.argv) > 3 else {}
    core = build_engine(
        EngineConfig.from_options(
            model=model, load_format="dummy", max_model_len=2048, max_num_batched_tokens=8192,
            kv_cache_memory_bytes=9126805504, max_num_seqs=concurrency,
            enable_prefix_caching=False, **options,
        )
    )  # fmt: skip
    rng = random.Random(1)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=1000)
    for i in range(concurrency):
        prompt = tuple(rng.randrange(1000, 100_000) for _ in range(512))
        core.add_request(EngineRequest(f"r{i}", prompt, params, 1512))
    for _ in range(30):
        core.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(STEPS):
            core.step()
        torch.cuda.synchronize()
    spans = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    total = Counter()
    count = Counter()
    for event in spans:
        total[event.name] += event.time_range.elapsed_us()
        count[event.name] += 1
    first = min(e.time_range.start for e in spans)
    last = max(e.time_range.end for e in spans)
    print(f"{(last - first) / STEPS / 1e3:.3f} ms a step, {len(spans) / STEPS:.0f} kernels")
    idle = gaps(spans)
    print(f"{sum(idle.values()) / STEPS:9.1f} us a step with nothing on the device, mostly between")
    for (before, after), microseconds in idle.most_common(12):
        print(f"{microseconds / STEPS:9.1f} us {before[:60]} -> {after[:60]}")
    for name, microseconds in total.most_common(32):
        calls = count[name] / STEPS
        print(f"{microseconds / STEPS:9.1f} us {calls:6.1f} x {name[:110]}")
    print(f"{sum(total.values()) / STEPS:9.1f} us in all, overlap counted twice")


if __name__ == "__main__":
    main()

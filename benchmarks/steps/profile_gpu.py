"""Profile of a captured decode step: kernels by name, from torch's profiler.

    python benchmarks/steps/profile_gpu.py MODEL CONCURRENCY [SPECULATIVE_JSON]

Dummy weights; 512 tokens in. With programmatic dependent launch a kernel starts early and waits
for the earlier ones; that wait does not count. A kernel's time runs from the end of all earlier
kernels to its own end. Prints the microseconds per step by kernel and its predecessor; they add
up to the step.
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
    first = min(e.time_range.start for e in spans)
    last = max(e.time_range.end for e in spans)
    print(f"{(last - first) / STEPS / 1e3:.3f} ms a step, {len(spans) / STEPS:.0f} kernels")
    own = own_times(spans)
    for (name, before), times in sorted(own.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        calls, each = len(times) / STEPS, statistics.median(times)
        print(
            f"{sum(times) / STEPS:9.1f} us {calls:6.1f} x {each:7.1f}"
            f"  {name[:60]}, behind {before[:60]}"
        )


if __name__ == "__main__":
    main()

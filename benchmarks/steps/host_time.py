"""The host's part of decoding steps, by function: microseconds of one request and step.

    python benchmarks/steps/host_time.py MODEL CONCURRENCY [--device DEVICE]
        [--speculative-config JSON]

MODEL's shape, with random weights; 32 tokens in, 100 out, greedy, no prefix cache. A function's
time is its own, without that of the other functions in the table, over the steps in which all
requests decode; the least of three runs. ``wait`` is the time in which the host waits for the
device. On a CPU the device is the host: ``forward`` and ``verify_and_propose`` compute the step,
and the output processor, which a server runs in another process, is not part of it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.runner.async_output import HostBuffer, PendingOutput
from sametoken.runner.runner import StepRunner
from sametoken.runner.step import Step
from sametoken.scheduler.plan_draft import PlanDraft, RowBudget
from sametoken.scheduler.scheduler import Scheduler
from sametoken.types.layout import StepLayout
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams

PARTS = (
    (EngineCore, "step"),
    (Scheduler, "plan"),
    (RowBudget, "share"),
    (PlanDraft, "build"),
    (StepRunner, "submit"),
    (StepLayout, "of"),
    (Step, "forward"),
    (Step, "verify_and_propose"),
    (PendingOutput, "wait"),
    (HostBuffer, "read"),
    (Scheduler, "process_output"),
)
PROMPT, OUTPUT, RUNS = 32, 100, 3


class OwnTimes:
    """Seconds of functions by name, each without those that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._within: list[float] = []

    def watch(self, owner: type, name: str) -> None:
        """Take the times of a method."""
        method = vars(owner)[name]
        function = method.__func__ if isinstance(method, classmethod) else method
        timed = self._timed(name, function)
        setattr(owner, name, classmethod(timed) if isinstance(method, classmethod) else timed)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._within.append(0.0)
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                took = time.perf_counter() - began
                self.seconds[name] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        return timed


def run(core: EngineCore, name: str, count: int, own: OwnTimes) -> dict[str, float]:
    """Microseconds of a request and step by function, while all requests decode."""
    params = SamplingParams(temperature=0.0, seed=0, ignore_eos=True, max_tokens=OUTPUT)
    for i in range(count):
        prompt = tuple((37 * i + 11 * j) % 1000 for j in range(PROMPT))
        core.add_request(EngineRequest(f"{name}-{i}", prompt, params, PROMPT + OUTPUT))
    left = {f"{name}-{i}": OUTPUT for i in range(count)}
    num_steps, found = 0, dict[str, float]()
    while core.has_unfinished:
        updates = core.step()
        for update in updates:
            left[update.request_id] -= len(update.token_ids)
        if max(left.values()) == OUTPUT:
            own.seconds.clear()
        elif min(left.values()) > 0:
            num_steps += bool(updates)
            found = dict(own.seconds)
        for request_id in [one for one, tokens in left.items() if tokens <= 0]:
            core.release(request_id)
    return {part: 1e6 * seconds / num_steps / count for part, seconds in found.items()}


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("concurrency", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--speculative-config", default=None)
    options = parser.parse_args(arguments)
    core = build_engine(
        EngineConfig.from_options(
            model=options.model, device=options.device, load_format="dummy",
            max_num_seqs=options.concurrency, max_model_len=2 * (PROMPT + OUTPUT),
            skip_tokenizer_init=True, enable_prefix_caching=False,
            speculative_config=options.speculative_config,
        )
    )  # fmt: skip
    own = OwnTimes()
    for owner, name in PARTS:
        own.watch(owner, name)
    # As a server's engine process has it.
    gc.collect()
    gc.freeze()
    runs = [run(core, str(i), options.concurrency, own) for i in range(RUNS)]
    for _, name in PARTS:
        print(f"{min(found[name] for found in runs):8.2f} us  {name}")
    print(f"{min(sum(found.values()) for found in runs):8.2f} us  all")


if __name__ == "__main__":
    main()

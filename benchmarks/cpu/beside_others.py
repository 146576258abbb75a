"""Plain decoding beside processes that compute all the time (docs/decisions/0042).

    python benchmarks/cpu/beside_others.py [MODEL] [--fixed]

Prints tokens/s of three requests beside each number of processes. ``--fixed``: steps keep torch's
number of threads, as before that decision. Run both in turns, on an otherwise quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

from sametoken import LLM, SamplingParams
from sametoken.distributed import ranks
from sametoken.runner.stream import ImmediateStream

NUM_OTHERS = (0, 1, 2, 4, 0)
NUM_TOKENS, NUM_REQUESTS = 64, 3


@contextlib.contextmanager
def others(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rate(llm: LLM) -> float:
    """Tokens/s of one request."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(["The quick brown fox jumps over"], params)
    return NUM_TOKENS / (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--fixed", action="store_true")
    options = parser.parse_args()
    if options.fixed:
        ranks.CpuStream = ImmediateStream
    llm = LLM(options.model)
    rate(llm)
    for count in NUM_OTHERS:
        with others(count):
            rates = [f"{rate(llm):.1f}" for _ in range(NUM_REQUESTS)]
        sys.stdout.write(f"beside {count}: {' '.join(rates)} tokens/s\n")


if __name__ == "__main__":
    main()

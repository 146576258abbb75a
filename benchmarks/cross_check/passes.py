"""Shared parts of the cross-check's sides: settings, prompts, and the results of a pass.

Imports no engine: vLLM's side runs without ours, and ours without vLLM.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

NUM_DRAFTS = 4
NUM_CANDIDATES = 5
#: Seconds in which the other parties have to be up.
PATIENCE = 150.0
ONE_BY_ONE, TOGETHER = "one at a time", "all at once"

#: [position][rank]: the most likely tokens at a position, (token id, log-probability).
Candidates = list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Prompt:
    """One request: a line of the prompts' file."""

    request: str
    prompt_token_ids: list[int]
    stop_token_ids: list[int]


@dataclass(frozen=True)
class Pass:
    """One way to run all prompts.

    Attributes:
        name: ``ONE_BY_ONE`` or ``TOGETHER``.
        steps: emitted tokens [request][step] of the first repeat; the first step is the prefill.
        seconds: of each repeat, from the first request to the last token.
        repeats_differ: requests whose answer differs between repeats.
        counters: the engine's counters: num_drafts, num_accepted_tokens and so on.
    """

    name: str
    steps: list[list[list[int]]]
    seconds: list[float]
    repeats_differ: int
    counters: dict

    @property
    def tokens(self) -> list[list[int]]:
        return [list(chain.from_iterable(steps)) for steps in self.steps]


@dataclass(frozen=True)
class Side:
    """One engine in one configuration.

    Attributes:
        engine: name and version.
        passes: by name.
        probed: the answers of a further pass with ``candidates``; empty without one.
        candidates: the candidates of ``probed``, by request.
        settings: further settings for the report.
    """

    engine: str
    passes: dict[str, Pass]
    probed: list[list[int]]
    candidates: list[Candidates]
    settings: dict


def engine_options(head: str | None) -> dict:
    """Options that both engines know, with drafts of a head or without."""
    speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": NUM_DRAFTS}
    return {
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "speculative_config": speculation if head else None,
    }


def greedy(prompt: Prompt, max_tokens: int, logprobs: int | None = None) -> dict:
    """Sampling parameters of both engines."""
    return {
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "stop_token_ids": prompt.stop_token_ids,
        "detokenize": False,
        "logprobs": logprobs,
    }


def ranked(position) -> list[tuple[int, float]]:
    found = [(int(token), float(one.logprob)) for token, one in position.items()]
    return sorted(found, key=lambda pair: -pair[1])


def read_prompts(path: Path) -> list[Prompt]:
    return [Prompt(**json.loads(line)) for line in path.read_text().splitlines()]


def write_side(path: Path, side: Side) -> None:
    path.write_text(json.dumps(asdict(side)) + "\n")


def read_side(path: Path) -> Side:
    found = json.loads(path.read_text())
    passes = {name: Pass(**one) for name, one in found.pop("passes").items()}
    return Side(passes=passes, **found)


def repeated(name: str, run, num_repeats: int) -> Pass:
    """Run a pass several times; ``run()`` returns its steps and counters."""
    seconds, every = [], []
    for _ in range(num_repeats):
        started = time.perf_counter()
        steps, counters = run()
        seconds.append(time.perf_counter() - started)
        every.append(Pass(name, steps, [], 0, counters))
    tokens = every[0].tokens
    differ = [sum(a != b for a, b in zip(tokens, one.tokens, strict=True)) for one in every]
    return Pass(name, every[0].steps, seconds, max(differ), every[0].counters)


def run_passes(prompts: list[Prompt], run) -> dict[str, Pass]:
    """All passes by name; ``run(batches)`` returns the steps and counters of its requests."""
    singly = [[prompt] for prompt in prompts]
    return {
        ONE_BY_ONE: repeated(ONE_BY_ONE, lambda: run(singly), 1),
        TOGETHER: repeated(TOGETHER, lambda: run([prompts]), 3),
    }


@contextmanager
def alone(gate: Path | None, name: str, parties: int) -> Iterator[None]:
    """Wait at most ``PATIENCE`` seconds until all parties are up, then take the lock."""
    if gate is None:
        yield
        return
    (gate / f"ready.{name}").touch()
    ends = time.monotonic() + PATIENCE
    while len(list(gate.glob("ready.*"))) < parties and time.monotonic() < ends:
        time.sleep(0.2)
    with (gate / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

"""What both sides of the cross-check share: settings, prompts, and what a pass over them gave.

Nothing here imports an engine: vLLM's side runs without ours, and ours without vLLM.
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
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 8192
KV_CACHE_BYTES = 2 << 30
NUM_CANDIDATES = 5
ONE_BY_ONE, TOGETHER = "one at a time", "all at once"

#: [position][rank]: the likeliest tokens of an answer's position, (token id, log-probability).
Candidates = list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Prompt:
    """One request: a line of the prompts' file."""

    request: str
    prompt_token_ids: list[int]
    stop_token_ids: list[int]


@dataclass(frozen=True)
class Pass:
    """One way to ask all prompts.

    Attributes:
        name: ``ONE_BY_ONE`` or ``TOGETHER``.
        steps: [request][step], the tokens that the step emitted; the first step ends the prompt.
        seconds: of each repeat, from the first request to the last token; steps are the first's.
        repeats_differ: requests that a repeat answered otherwise than the first.
        counters: num_drafts, num_accepted_tokens and so on, as the engine itself counts them.
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
        probed: the answers of one more pass that asked for ``candidates``; empty without one.
        candidates: [request], those of ``probed``.
        settings: whatever else a reader may want to know.
    """

    engine: str
    passes: dict[str, Pass]
    probed: list[list[int]]
    candidates: list[Candidates]
    settings: dict


def read_prompts(path: Path) -> list[Prompt]:
    return [Prompt(**json.loads(line)) for line in path.read_text().splitlines()]


def write_side(path: Path, side: Side) -> None:
    path.write_text(json.dumps(asdict(side)) + "\n")


def read_side(path: Path) -> Side:
    found = json.loads(path.read_text())
    passes = {name: Pass(**one) for name, one in found.pop("passes").items()}
    return Side(passes=passes, **found)


def repeated(name: str, run, num_repeats: int) -> Pass:
    """Run a pass several times; ``run()`` gives its steps and the counters of that run."""
    seconds, every = [], []
    for _ in range(num_repeats):
        started = time.perf_counter()
        steps, counters = run()
        seconds.append(time.perf_counter() - started)
        every.append(Pass(name, steps, [], 0, counters))
    tokens = every[0].tokens
    differ = [sum(a != b for a, b in zip(tokens, one.tokens, strict=True)) for one in every]
    return Pass(name, every[0].steps, seconds, max(differ), every[0].counters)


@contextmanager
def alone(gate: Path | None, name: str, parties: int, patience: float) -> Iterator[None]:
    """Wait until all parties are up, at most ``patience`` seconds, then measure one by one."""
    if gate is None:
        yield
        return
    (gate / f"ready.{name}").touch()
    ends = time.monotonic() + patience
    while len(list(gate.glob("ready.*"))) < parties and time.monotonic() < ends:
        time.sleep(0.2)
    with (gate / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

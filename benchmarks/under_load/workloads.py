"""What ``drive.py`` asks of an engine: the same requests of every engine, run after run.

Requests are a function of the workload, the sizes, the vocabulary and the repeat. Nothing here
needs an engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

#: Tokens that a request of a warm-up gets, and how many requests a warm-up of ``mixed`` has.
WARM_TOKENS, WARM_MIXED = 16, 64
#: Prompts of ``ngram-repeat`` say this many tokens again and again.
SPAN = 64
#: Random ids keep away from both ends of a large vocabulary, where special tokens are.
EDGE = 1000
#: An array that no answer of a benchmark completes, so that none ends before its length.
SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 4096}'
KINDS = ("burst", "mixed", "long", "asked", "ngram-never", "ngram-repeat")
#: The vocabulary's ids that are biased, and the range that is allowed, as fractions.
_BIASED, _ALLOWED = 150, (300, 7)

DENSE = ["burst:1", "burst:8", "burst:16", "burst:32", "burst:64", "burst:128", "burst:256"]
FEW = ["burst:1", "burst:64", "burst:256"]
LONG = ["long:1x16384", "long:8x16384", "long:1x32000"]
NGRAM = ["ngram-never", "ngram-never:1", "ngram-repeat"]
#: Workloads of a configuration, unless others are named.
WORKLOADS = {
    "plain": [*DENSE, "mixed:384", *LONG, *NGRAM, "asked"],
    "eagle3": [*FEW, "mixed:384", "long:8x16384"],
    "q35": [*FEW, "mixed:384", "long:8x16384", "long:1x32000"],
    "q35mtp3": [*FEW, "mixed:384"],
    "ngram5": NGRAM,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and requests, as far as a workload's name leaves them open.

    Attributes:
        input_len, output_len: of every request but those of ``mixed`` and ``long``.
        mixed_input, mixed_output: the shortest and the longest of ``mixed``.
        long_output: tokens that follow a long prompt.
        crowd: requests of ``asked`` and of the n-gram workloads.
    """

    input_len: int = 512
    output_len: int = 128
    mixed_input: tuple[int, int] = (32, 1024)
    mixed_output: tuple[int, int] = (16, 384)
    long_output: int = 32
    crowd: int = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        asked: sampling parameters under the names that both engines have, beside
            ``grammar``, a JSON schema; greedy without any.
    """

    request_id: str
    prompt: tuple[int, ...]
    output_len: int
    asked: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at once.

    Attributes:
        workload: the name under which it was asked for.
        kind: one of ``KINDS``.
        count: how many requests.
        input_len: of ``long``.
        temperature: of all requests.
        asked: what ``num_asking`` of them ask for beside it; "" for nothing.
    """

    workload: str
    kind: str
    count: int
    input_len: int = 0
    temperature: float = 0.0
    asked: str = ""
    num_asking: int = 0

    @property
    def name(self) -> str:
        """For a line of a report."""
        if self.kind != "asked":
            return self.workload
        return f"asked: {self.asked or 'nothing'}, {self.num_asking} of {self.count}"

    @property
    def never_repeats(self) -> bool:
        """Whether an output must not say a token twice."""
        return self.kind == "ngram-never"


def loads_of(workload: str, sizes: Sizes) -> list[Load]:
    """The loads of a workload by its name: ``burst:N``, ``mixed:N``, ``long:NxTOKENS``,
    ``ngram-never``, ``ngram-repeat``, both with ``:TEMPERATURE`` or without, or ``asked``.

    Raises:
        ValueError: no workload is called so.
    """
    kind, _, rest = workload.partition(":")
    if kind in ("burst", "mixed"):
        return [Load(workload, kind, int(rest))]
    if kind == "long":
        count, tokens = map(int, rest.split("x"))
        return [Load(workload, kind, count, input_len=tokens)]
    if kind in ("ngram-never", "ngram-repeat"):
        return [Load(workload, kind, sizes.crowd, temperature=float(rest or 0))]
    if workload == "asked":
        return list(_asked_loads(sizes.crowd))
    raise ValueError(f"no workload is called {workload!r}: use {KINDS}")


def _asked_loads(crowd: int) -> Iterator[Load]:
    """A load in which nobody asks, then of each thing one in which a quarter asks and all ask.

    Beside "temperature" the others are greedy, beside all else they have a temperature.
    """
    yield Load("asked", "asked", crowd)
    for name in asked_values(EDGE):
        temperature = 0.0 if name == "temperature" else 0.8
        for num_asking in (max(crowd // 4, 1), crowd):
            yield Load("asked", "asked", crowd, 0, temperature, name, num_asking)


def asked_values(vocab_size: int) -> dict[str, dict[str, Any]]:
    """What may be asked for, by name."""
    biased = vocab_size // _BIASED
    low, high = (vocab_size // part for part in _ALLOWED)
    return {
        "temperature": {"temperature": 0.8},
        "top_p": {"top_p": 0.95},
        "repetition_penalty": {"repetition_penalty": 1.1},
        "logit_bias": {"logit_bias": {biased: 2.0, biased + 1: -3.0}},
        "allowed_token_ids": {"allowed_token_ids": list(range(low, high))},
        "logprobs": {"logprobs": 1},
        "grammar": {"grammar": SCHEMA},
    }


def requests_of(load: Load, sizes: Sizes, vocab_size: int, repeat: int) -> list[Request]:
    """The requests of one run; every repeat has other prompts."""
    rng = random.Random(f"{load.workload} {repeat}")
    edge = EDGE if vocab_size > 4 * EDGE else 0
    ids = range(edge, vocab_size - edge)
    values = asked_values(vocab_size).get(load.asked, {})
    every = load.count // load.num_asking if load.num_asking else 0
    requests = []
    for index in range(load.count):
        input_len, output_len = _lengths(load, sizes, rng)
        asked = {"temperature": load.temperature} if load.temperature else {}
        if every and index % every == 0:
            asked |= values
        prompt = _prompt(load.kind, ids, input_len, rng)
        name = f"{load.workload}/{load.asked}{load.num_asking}/{repeat}/{index}"
        requests.append(Request(name, prompt, output_len, asked))
    return requests


def _lengths(load: Load, sizes: Sizes, rng: random.Random) -> tuple[int, int]:
    if load.kind == "mixed":
        return rng.randint(*sizes.mixed_input), rng.randint(*sizes.mixed_output)
    if load.kind == "long":
        return load.input_len, sizes.long_output
    return sizes.input_len, sizes.output_len


def _prompt(kind: str, ids: range, length: int, rng: random.Random) -> tuple[int, ...]:
    if kind == "ngram-never":
        return tuple(rng.sample(ids, length))
    if kind == "ngram-repeat":
        span = rng.sample(ids, SPAN)
        return tuple(span[i % SPAN] for i in range(length))
    return tuple(rng.choices(ids, k=length))


def warm_up_of(load: Load, requests: list[Request]) -> list[Request]:
    """A short run that meets what the load meets: other prompts, few tokens each."""
    is_long = load.kind == "long"
    most = 1 if is_long else WARM_MIXED if load.kind == "mixed" else len(requests)
    tokens = WARM_TOKENS // 4 if is_long else WARM_TOKENS
    return [
        replace(one, request_id=f"warm-{one.request_id}", output_len=min(one.output_len, tokens))
        for one in requests[:most]
    ]

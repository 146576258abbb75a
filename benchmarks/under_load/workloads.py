"""The workloads of ``drive.py``: the same requests for every engine and run.

Requests are a function of the workload, the sizes, the vocabulary and the repeat, and need no
engine.
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
STEPS = ["burst:1", "burst:8", "burst:64"]
LONG = ["long:1x16384", "long:8x16384", "long:1x32000"]
NGRAM = ["ngram-never", "ngram-never:1", "ngram-repeat"]
#: Workloads of a configuration, unless others are named; of others ``STEPS``.
WORKLOADS = {
    "plain": [*DENSE, "mixed:384", *LONG, *NGRAM, "asked"],
    "eagle3": [*FEW, "mixed:384", "long:8x16384"],
    **{name: [*STEPS, *LONG] for name in ("llama", "llamaeagle3")},
    "small": [*FEW, "mixed:384", "long:8x100", "long:64x100"],
    "q35": [*FEW, "mixed:384", "long:8x16384", "long:1x32000"],
    "q35mtp3": [*FEW, "mixed:384"],
    "ngram5": NGRAM,
    **{
        name: [*STEPS, "long:8x16384"]
        for name in ("glm", "glmmtp3", "gptoss", "gemma3", "graniteh")
    },
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
        sampling: sampling parameters under names that both engines have, and ``grammar``, a
            JSON schema; greedy if empty.
    """

    request_id: str
    prompt: tuple[int, ...]
    output_len: int
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at once.

    Attributes:
        workload: name of the workload.
        kind: one of ``KINDS``.
        count: number of requests.
        input_len: prompt tokens of ``long``, and of every fourth request of ``mixed`` if not 0.
        temperature: temperature of all requests.
        option: the option that ``num_with_option`` of them set; "" for none.
    """

    workload: str
    kind: str
    count: int
    input_len: int = 0
    temperature: float = 0.0
    option: str = ""
    num_with_option: int = 0

    @property
    def name(self) -> str:
        """Name of the load in reports."""
        if self.kind != "asked":
            return self.workload
        return f"asked: {self.option or 'nothing'}, {self.num_with_option} of {self.count}"

    @property
    def never_repeats(self) -> bool:
        """Whether an output must not repeat a token."""
        return self.kind == "ngram-never"


def loads_of(workload: str, sizes: Sizes) -> list[Load]:
    """Parse a workload's name: ``burst:N``, ``mixed:N[xTOKENS]``, ``long:NxTOKENS``, ``asked``,
    ``ngram-never`` or ``ngram-repeat``, the last two optionally with ``:TEMPERATURE``.

    Raises:
        ValueError: the name is unknown.
    """
    kind, _, rest = workload.partition(":")
    if kind == "burst" or (kind == "mixed" and "x" not in rest):
        return [Load(workload, kind, int(rest))]
    if kind in ("mixed", "long"):
        count, tokens = map(int, rest.split("x"))
        return [Load(workload, kind, count, input_len=tokens)]
    if kind in ("ngram-never", "ngram-repeat"):
        return [Load(workload, kind, sizes.crowd, temperature=float(rest or 0))]
    if workload == "asked":
        return list(_option_loads(sizes.crowd))
    raise ValueError(f"no workload is called {workload!r}: use {KINDS}")


def _option_loads(crowd: int) -> Iterator[Load]:
    """Yield a load without options, then two for each option: a quarter of the requests, and all.

    The other requests are greedy for the option "temperature", and sampled for all others.
    """
    yield Load("asked", "asked", crowd)
    for name in option_values(EDGE):
        temperature = 0.0 if name == "temperature" else 0.8
        for num_with_option in (max(crowd // 4, 1), crowd):
            yield Load("asked", "asked", crowd, 0, temperature, name, num_with_option)


def option_values(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return the options by name, as sampling parameters."""
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
    """Make the requests of one run; prompts differ between repeats."""
    rng = random.Random(f"{load.workload} {repeat}")
    edge = EDGE if vocab_size > 4 * EDGE else 0
    ids = range(edge, vocab_size - edge)
    values = option_values(vocab_size).get(load.option, {})
    every = load.count // load.num_with_option if load.num_with_option else 0
    requests = []
    for index in range(load.count):
        input_len, output_len = _lengths(load, index, sizes, rng)
        sampling = {"temperature": load.temperature} if load.temperature else {}
        if every and index % every == 0:
            sampling |= values
        prompt = _prompt(load.kind, ids, input_len, rng)
        name = f"{load.workload}/{load.option}{load.num_with_option}/{repeat}/{index}"
        requests.append(Request(name, prompt, output_len, sampling))
    return requests


def _lengths(load: Load, index: int, sizes: Sizes, rng: random.Random) -> tuple[int, int]:
    if load.kind == "mixed":
        input_len, output_len = rng.randint(*sizes.mixed_input), rng.randint(*sizes.mixed_output)
        return load.input_len if load.input_len and index % 4 == 0 else input_len, output_len
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
    """Make the warm-up of a load: the same kind of requests, with few tokens each."""
    is_long = load.kind == "long"
    most = 1 if is_long else WARM_MIXED if load.kind == "mixed" else len(requests)
    tokens = WARM_TOKENS // 4 if is_long else WARM_TOKENS
    return [
        replace(one, request_id=f"warm-{one.request_id}", output_len=min(one.output_len, tokens))
        for one in requests[:most]
    ]

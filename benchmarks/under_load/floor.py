"""The minimum time of a load on a machine, from counted work and measured rates.

A step of the fewest steps takes

- the products of all its rows at the rate of products of 4096 rows, or the time in which the
  weights are read, where that is longer: that of decode steps of few rows;
- and reading the KV of its decoding requests once, and moving their recurrent state, at the
  rate of copies.

Prompts within ``max_num_seqs`` join the next step whole, so a step reads the weights once for all
of them. The prompts' attention is counted separately (``attention``), at the rate of products; it
matters only for long prompts.

With drafts, a window has as many rows as the engine verifies, and a request emits the mean of
synthetic acceptance per window: 2.95 of 4 rows at 0.80, 0.64 and 0.51. The last window counts in
proportion to the tokens needed. A draft head runs every committed row once, and one more row for
each draft after the first; each draft has one row of logits. N-gram drafts cost nothing here, and
their windows have the measured width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

PRODUCT = 2  # a multiplication and an addition


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of the machine: operations and bytes per second."""

    products: float
    read: float
    copy: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a model: matrix elements per row, and bytes.

    Attributes:
        layers, head: of the target, per row and per row with logits.
        attention: per position that a prompt row attends to.
        fusion, draft_layers, draft_head: of the drafter; its layers include experts.
        weights: bytes that a decode step reads, including the drafter's passes.
        kv: bytes per position of a request.
        recurrent: bytes of a request's state per step.
        k: maximum drafts per window.
    """

    layers: int
    head: int
    attention: int
    weights: int
    kv: int
    recurrent: int = 0
    fusion: int = 0
    draft_layers: int = 0
    draft_head: int = 0
    k: int = 0

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Costs:
        """Build from the facts that our side records."""
        return cls(**{one.name: facts[one.name] for one in fields(cls)})


@dataclass(frozen=True, slots=True)
class Window:
    """A decoding request's step: verified rows and emitted tokens."""

    rows: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True, slots=True)
class Floor:
    """The floors of a load, in seconds.

    Attributes:
        work: products of all rows and KV of all windows, independent of steps.
        wall: all requests to their last tokens; each step reads the weights.
        first_token: mean time to first token; None if some requests have to wait.
        step: a step in which all decode, halfway through their outputs; None likewise.
        attention: attention of all prompts; ``first_attention`` is its part of ``first_token``.
    """

    work: float
    wall: float
    first_token: float | None
    step: float | None
    attention: float
    first_attention: float | None


def floor_of(
    lengths: list[tuple[int, int]],
    costs: Costs,
    rates: Rates,
    window: Window,
    max_num_seqs: int,
) -> Floor:
    """Compute the floor of requests that arrive at once.

    Args:
        lengths: prompt and output tokens of each request, in order of arrival.
        costs: costs of the model.
        rates: rates of the machine.
        window: window of every decoding request.
        max_num_seqs: maximum number of running requests.
    """
    waiting, running = list(lengths), list[list[float]]()
    work = wall = 0.0
    while waiting or running:
        step = _Step(costs, window)
        for request in running:
            request[0] += step.decode(*request)
        running = [[at, end] for at, end in running if at < end - 1e-9]
        free = max_num_seqs - len(running)
        admitted, waiting = waiting[:free], waiting[free:]
        for prompt, output in admitted:
            step.prefill(prompt)
            if output > 1:
                running.append([prompt + 1, prompt + output])
        work += step.products(rates) + step.copies(rates)
        wall += step.seconds(rates)
    attention = [_attention(prompt, costs, rates) for prompt, _ in lengths]
    if len(lengths) > max_num_seqs:
        return Floor(work, wall, None, None, sum(attention), None)
    alone = []
    for prompt, _ in lengths:
        step = _Step(costs, window)
        step.prefill(prompt)
        alone.append(step.products(rates))
    middle = _Step(costs, window)
    for prompt, output in lengths:
        middle.decode(prompt + output / 2, prompt + output)
    return Floor(
        work,
        wall,
        max(_mean_end(alone), costs.weights / rates.read),
        middle.seconds(rates),
        sum(attention),
        _mean_end(attention),
    )


class _Step:
    """Work of one step."""

    def __init__(self, costs: Costs, window: Window) -> None:
        self._costs, self._window = costs, window
        self._elements = self._bytes = 0.0

    def prefill(self, prompt: int) -> None:
        """Add a whole prompt; its last row has logits, and a draft head runs all rows."""
        costs = self._costs
        drafted = costs.fusion + costs.draft_layers
        self._elements += prompt * (costs.layers + drafted) + costs.head + self._chain(1.0)

    def decode(self, at: float, end: float) -> float:
        """Add a window of a request with ``at`` tokens; return the emitted tokens."""
        costs, window = self._costs, self._window
        tokens = min(window.tokens, end - at)
        share = tokens / window.tokens
        rows = share * window.rows
        drafted = tokens * (costs.fusion + costs.draft_layers)
        self._elements += rows * (costs.layers + costs.head) + drafted + self._chain(share)
        self._bytes += share * (costs.kv * at + costs.recurrent)
        return tokens

    def _chain(self, share: float) -> float:
        """Add one row per draft after the first, and the logits of each draft."""
        costs = self._costs
        if not costs.k:
            return 0.0
        return share * ((costs.k - 1) * costs.draft_layers + costs.k * costs.draft_head)

    def products(self, rates: Rates) -> float:
        return PRODUCT * self._elements / rates.products

    def copies(self, rates: Rates) -> float:
        return self._bytes / rates.copy

    def seconds(self, rates: Rates) -> float:
        longer = max(self.products(rates), self._costs.weights / rates.read)
        return longer + self.copies(rates)


def _attention(prompt: int, costs: Costs, rates: Rates) -> float:
    return PRODUCT * costs.attention * prompt * (prompt + 1) / 2 / rates.products


def _mean_end(parts: list[float]) -> float:
    """Return the mean end time of parts that run in sequence."""
    return sum(one * (len(parts) - index) for index, one in enumerate(parts)) / len(parts)

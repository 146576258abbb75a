"""Prometheus counters of ``/metrics``: ours, and vLLM's under the same names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sametoken.bench.http_client import get
from sametoken.types.outputs import SpeculationMetrics

Key = TypeVar("Key", str, int)

_PREFIXES = ("sametoken:", "vllm:")
_ACCEPTED_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_OFFERED_PER_POSITION = "spec_decode_num_draft_tokens_per_pos_total"
_STEPS = "spec_decode_num_steps_total"
_DRAFTS = "spec_decode_num_drafts_total"
_DRAFT_TOKENS = "spec_decode_num_draft_tokens_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True, slots=True)
class Counters:
    """A snapshot or difference of a server's counters.

    Attributes:
        totals: by name without prefix, summed over all labels.
        positions: counters with a position label, by name and position from 0.
    """

    totals: Mapping[str, float] = field(default_factory=dict)
    positions: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def __add__(self, other: Counters) -> Counters:
        return self._with(other, 1)

    def since(self, before: Counters) -> Counters:
        """Subtract an earlier snapshot."""
        return self._with(before, -1)

    def _with(self, other: Counters, sign: int) -> Counters:
        names = self.positions.keys() | other.positions.keys()
        return Counters(
            _combined(self.totals, other.totals, sign),
            {
                name: _combined(self.positions.get(name, {}), other.positions.get(name, {}), sign)
                for name in sorted(names)
            },
        )

    @property
    def went_back(self) -> bool:
        """Whether a difference is negative: the server restarted in between."""
        return any(value < 0 for value in self.totals.values())

    @property
    def num_draft_tokens(self) -> int | None:
        """Drafts that were verified; None if the server does not count them."""
        counted = self.totals.get(_DRAFT_TOKENS)
        return None if counted is None else int(counted)

    def speculation(self) -> dict[str, Any] | None:
        """Compute acceptance under the names of ``SpeculationStats``; None without drafts.

        vLLM counts no steps without drafts, so its length is over windows with drafts. The rate at
        a position divides by the drafts offered there, or by all windows if the server does not
        count those.
        """
        drafts, offered = self.totals.get(_DRAFTS, 0), self.totals.get(_DRAFT_TOKENS, 0)
        if drafts <= 0 or offered <= 0:
            return None
        steps, accepted = self.totals.get(_STEPS, drafts), self.totals.get(_ACCEPTED, 0)
        rates = [n / there if there else 0.0 for there, n in self.by_position()]
        return speculation_of(SpeculationMetrics(int(steps), int(offered), int(accepted)), rates)

    def by_position(self) -> list[tuple[float, float]]:
        """Drafts offered and accepted at each position; offered: as for ``speculation``."""
        drafts, there = self.totals.get(_DRAFTS, 0), self.positions.get(_OFFERED_PER_POSITION, {})
        accepted = self.positions.get(_ACCEPTED_PER_POSITION, {})
        return [(there.get(i, drafts), accepted[i]) for i in sorted(accepted)]


def speculation_of(counted: SpeculationMetrics, rates: Sequence[float]) -> dict[str, Any]:
    """Totals and acceptance under the names of ``SpeculationStats``, and rates by position."""
    return {
        "num_steps": counted.num_steps,
        "num_draft_tokens": counted.num_draft_tokens,
        "num_accepted_tokens": counted.num_accepted_tokens,
        "acceptance_length": counted.acceptance_length,
        "acceptance_rate": counted.acceptance_rate,
        "acceptance_per_position": list(rates),
    }


def _combined(one: Mapping[Key, float], other: Mapping[Key, float], sign: int) -> dict[Key, float]:
    both = dict(one)
    for key, value in other.items():
        both[key] = both.get(key, 0) + sign * value
    return both


def parse_counters(text: str) -> Counters:
    """Parse counters with our prefix or vLLM's from Prometheus' text format.

    Raises:
        ValueError: the text is malformed, or one of the counters is not finite.
    """
    totals: dict[str, float] = defaultdict(float)
    positions: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        prefix = next((p for p in _PREFIXES if family.name.startswith(p)), None)
        if prefix is None:
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue
            if not math.isfinite(sample.value):
                raise ValueError(f"{sample.name} is {sample.value}")
            name = sample.name.removeprefix(prefix)
            if "position" in sample.labels:
                positions[name][int(sample.labels["position"])] += sample.value
            else:
                totals[name] += sample.value
    return Counters(dict(totals), {name: dict(values) for name, values in positions.items()})


async def metrics_text(client: httpx.AsyncClient) -> str:
    """The text of ``/metrics``.

    Raises:
        httpx.HTTPError, RequestError: as ``get``.
    """
    return (await get(client, "/metrics")).decode("utf-8", "replace")


async def scrape(client: httpx.AsyncClient) -> Counters | None:
    """Read the current counters; None without a readable ``/metrics``."""
    try:
        return parse_counters(await metrics_text(client))
    except (httpx.HTTPError, ValueError):
        return None

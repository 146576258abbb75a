"""Prometheus counters of ``/metrics``: ours, and vLLM's under the same names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

Key = TypeVar("Key", str, int)

_PREFIXES = ("sametoken:", "vllm:")
ACCEPTED_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_OFFERED_PER_POSITION = "spec_decode_num_draft_tokens_per_pos_total"
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

    def speculation(self) -> dict[str, Any] | None:
        """Compute acceptance under the names of ``SpeculationStats``; None without drafts.

        The length is 1 + accepted / windows with drafts, as in vLLM. The rate at a position
        divides by the drafts offered there, or by all windows if the server does not count
        those.
        """
        drafts, offered = self.totals.get(_DRAFTS, 0), self.totals.get(_DRAFT_TOKENS, 0)
        if drafts <= 0 or offered <= 0:
            return None
        accepted = self.totals.get(_ACCEPTED, 0)
        there = self.positions.get(_OFFERED_PER_POSITION, {})
        by_position = self.positions.get(ACCEPTED_PER_POSITION, {})
        return {
            "num_steps": int(drafts),
            "num_draft_tokens": int(offered),
            "num_accepted_tokens": int(accepted),
            "acceptance_length": 1 + accepted / drafts,
            "acceptance_rate": accepted / offered,
            "acceptance_per_position": [
                by_position[i] / n if (n := there.get(i, drafts)) else 0.0
                for i in sorted(by_position)
            ],
        }


def _combined(one: Mapping[Key, float], other: Mapping[Key, float], sign: int) -> dict[Key, float]:
    both = dict(one)
    for key, value in other.items():
        both[key] = both.get(key, 0) + sign * value
    return both


def parse_counters(text: str) -> Counters:
    """Parse counters with our prefix or vLLM's from Prometheus' text format.

    Raises:
        ValueError: the text is malformed.
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
            name = sample.name.removeprefix(prefix)
            if "position" in sample.labels:
                positions[name][int(sample.labels["position"])] += sample.value
            else:
                totals[name] += sample.value
    return Counters(dict(totals), {name: dict(values) for name, values in positions.items()})


async def scrape(client: httpx.AsyncClient) -> Counters | None:
    """Read the current counters; None without a readable ``/metrics``."""
    try:
        response = await client.get("/metrics")
        response.raise_for_status()
        return parse_counters(response.text)
    except (httpx.HTTPError, ValueError):
        return None

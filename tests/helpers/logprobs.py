"""Reported log-probabilities against plain numbers."""

from __future__ import annotations

import math

import pytest


def check_entry(entry, logits, chosen: int, num_top: int) -> None:
    """One position against a plain softmax and a stable sort."""
    values = [float(v) for v in logits]
    total = math.log(sum(math.exp(v) for v in values))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert set(entry) == {chosen, *order[:num_top]}
    assert next(iter(entry)) == chosen
    for token_id, candidate in entry.items():
        assert candidate.rank == order.index(token_id) + 1
        assert candidate.logprob == pytest.approx(values[token_id] - total, abs=1e-5)

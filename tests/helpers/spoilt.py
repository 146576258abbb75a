"""Drafters that would be always right, spoilt at a known place of each window.

Exactly the drafts before that place must be accepted: one that reads a rejected row, a stale
length or another request's KV is caught by its acceptance, which no token shows.
"""

from __future__ import annotations

import random
from types import MappingProxyType

from sametoken.runner.stream import LaggingStream
from sametoken.types.outputs import SpeculationCounts, SpeculationMetrics


def spoilt_at(num_tokens: int, k: int) -> int:
    """Which draft of the window after a number of committed tokens is wrong; k and above: none."""
    return num_tokens % (k + 2)


class Spoilt:
    """Another drafter with one wrong draft in most windows."""

    def __init__(self, drafter, k: int, vocab: int) -> None:
        self.drafter, self.k, self.vocab = drafter, k, vocab
        self.kv_caches = drafter.kv_caches
        self.lookahead_slots = drafter.lookahead_slots
        self.lookahead_tokens = drafter.lookahead_tokens

    def propose(self, context):
        committed = context.num_tokens.tolist()
        drafts = self.drafter.propose(context)
        for ids, num_tokens in zip(drafts.draft_ids, committed, strict=True):
            if (at := spoilt_at(num_tokens, self.k)) < self.k:
                ids[at] = (ids[at] + 1) % self.vocab
        return drafts


def make_stream(kind: str):
    """The device does nothing before it is waited for, or as much as it likes."""
    if kind == "late":
        return LaggingStream()
    chance = random.Random(1)
    return LaggingStream(lambda queued: chance.randint(0, queued))


def measure(
    core, items, check=lambda item, num_tokens, update: None, plain=MappingProxyType({})
) -> SpeculationMetrics:
    """Run requests, checking each window and then ``plain`` tokens; count drafts by position."""
    counts, out = SpeculationCounts(), {item.request_id: [] for item in items}
    by_id = {item.request_id: item for item in items}
    for item in items:
        core.add_request(item)
    while core.has_unfinished:
        for update in core.step():
            item, tokens = by_id[update.request_id], out[update.request_id]
            check(item, len(item.prompt_token_ids) + len(tokens), update)
            counts.add(update.num_drafts, update.num_accepted)
            tokens.extend(update.token_ids)
            if len(item.prompt_token_ids) + len(tokens) >= item.max_total_tokens:
                core.release(item.request_id)
    for name, tokens in plain.items():
        assert out[name][: len(tokens)] == tokens
    return counts.metrics()


def measure_spoilt(core, items, k: int, plain=MappingProxyType({})) -> SpeculationMetrics:
    """``measure`` of a spoilt drafter, window by window."""

    def check(item, num_tokens, update):
        assert update.num_accepted == min(update.num_drafts, spoilt_at(num_tokens, k))

    total = measure(core, items, check, plain)
    assert all(total.offered_per_position)
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens
    return total

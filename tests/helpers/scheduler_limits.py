"""Limits of a scheduler of tests, small and without drafts."""

from __future__ import annotations

from sametoken.scheduler.draft_limits import StepReads
from sametoken.scheduler.limits import SchedulerLimits

DEFAULTS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "longest_chunk": 64,
    "block_size": 4,
    "num_blocks": 32,
    "num_host_blocks": 32,
    "num_idle_host_blocks": 0,
    "max_model_len": 64,
    "num_speculative_tokens": 0,
    "adaptive_drafts": False,
    "reads": StepReads(32),
    "busy_rows": 10_000,
    "usual_rows": 10_000,
    "lookahead_slots": 0,
    "lookahead_tokens": 0,
    "sliding_window": 0,
    "enable_prefix_caching": True,
    "cache_emitted_blocks": True,
    "num_kept_states": 0,
}


def make_limits(**overrides) -> SchedulerLimits:
    return SchedulerLimits(**{**DEFAULTS, **overrides})

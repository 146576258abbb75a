"""Engines of small checkpoints, as users build them, and requests around the edges of chunks."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from helpers.harness import requests_of, run
from helpers.static_steps import in_steps
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore

# Repetitive, so that n-grams are found; tokens 0 and 1 begin every prompt.
PROMPTS = [[0, 1, 4], [0, 1, 6, 5, 3, 5, 8, 9], list(range(17)), [0, 1, 7, 7, 7], [0, 1, 7] * 8]
MAX_TOKENS = 16
SIZES = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "prefill_chunk_size": 8,
    "block_size": 8,
    "max_model_len": 48,
    "kv_cache_memory_bytes": 2**20,
}


def build(path, spec: dict | None = None, steps: str = "compact", **options) -> EngineCore:
    """An engine of ``SIZES``, its steps in one of ``static_steps.STEPS``."""
    options = {"model": str(path), "speculative_config": spec} | SIZES | options
    core = build_engine(EngineConfig.from_options(**options))
    core._runner = in_steps(core._runner, steps)
    return core


def mtp(k: int, **more) -> dict:
    """The speculative config of the checkpoint's own module."""
    return {"method": "mtp", "num_speculative_tokens": k} | more


def requests():
    """Every other one is sampled."""
    return requests_of(PROMPTS, MAX_TOKENS, 0.0, 0.9)


def scored(core, wanted) -> dict[str, list]:
    """Tokens with their log-probabilities, in which other bits of any row show."""
    step, found = core.step, defaultdict(list)

    def noting():
        updates = step()
        for one in updates:
            found[one.request_id] += [*(one.prompt_logprobs or ()), *(one.logprobs or ())]
        return updates

    core.step = noting
    lengths = {name: len(ids) for name, ids in run(core, wanted).tokens.items()}
    core.step = step
    return {name: [str(one) for one in found[name][:n]] for name, n in lengths.items()}


@lru_cache
def plain(path, dtype: str = "float32") -> dict[str, list[int]]:
    """The target's own tokens."""
    return run(build(path, dtype=dtype), requests()).tokens


def cached_by(core: EngineCore) -> list[int]:
    """Tokens of prompts that the prefix cache holds, in every update; grows as it runs."""
    step, cached = core.step, []

    def watched():
        updates = step()
        cached.extend(update.num_cached for update in updates)
        return updates

    core.step = watched
    return cached

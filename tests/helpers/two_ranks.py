"""Answers of small engines whose model two ranks share, or that one rank has whole."""

from __future__ import annotations

import random
from collections.abc import Iterator

from helpers.harness import request
from helpers.static_steps import in_steps
from helpers.thread_ranks import engine_over_threads
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.types.request import EngineRequest

# Ranks do not divide it evenly.
VOCAB = 47
OPTIONS = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "max_model_len": 96,
    "max_num_batched_tokens": 64,
    "prefill_chunk_size": 32,
    "kv_cache_memory_bytes": 2**22,
    "tensor_parallel_size": 2,
}
MAX_TOKENS = 14
PARAMS = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.1, "logprobs": 2, "prompt_logprobs": 1},
)


def requests() -> Iterator[EngineRequest]:
    """Prompts around the edges of blocks and chunks, some that repeat themselves."""
    chooser = random.Random(5)
    for i, length in enumerate((1, 7, 16, 17, 33, 40)):
        period = 1 + i % 3
        pattern = [chooser.randrange(VOCAB) for _ in range(period)]
        prompt = (pattern * length)[:length]
        yield request(f"r{i}", prompt, MAX_TOKENS, seed=i, **PARAMS[i % len(PARAMS)])


class Answers(dict):
    """Tokens and log-probabilities by request, and what was offered and accepted."""

    offered = accepted = 0


def drive(core: EngineCore, items=None) -> Answers:
    """Run requests, by default all of ``requests``, to their lengths."""
    answers, num_kept = Answers(), {}
    for item in requests() if items is None else items:
        core.add_request(item)
        num_kept[item.request_id] = len(item.prompt_token_ids) + MAX_TOKENS
        answers[item.request_id] = [], []
    while core.has_unfinished:
        for update in core.step():
            answers.offered += update.num_drafts
            answers.accepted += update.num_accepted
            tokens, logprobs = answers[update.request_id]
            tokens += update.token_ids
            logprobs += update.logprobs or ()
            if len(tokens) >= MAX_TOKENS:
                del tokens[MAX_TOKENS:], logprobs[MAX_TOKENS:]
                core.release(update.request_id, num_kept[update.request_id])
    core.scheduler.check_integrity()
    return answers


def config_of(target, speculation=None, **options) -> EngineConfig:
    return EngineConfig.from_options(
        model=str(target), speculative_config=speculation, **OPTIONS | options
    )


def answer(target, speculation=None, items=None, **options) -> Answers:
    """What an engine says whose ranks, if there are several, are threads."""
    config = config_of(target, speculation, **options)
    if config.tensor_parallel_size == 1:
        core = build_engine(config)
        core._runner = in_steps(core._runner)
        return drive(core, items)
    with engine_over_threads(config) as (core, _):
        return drive(core, items)

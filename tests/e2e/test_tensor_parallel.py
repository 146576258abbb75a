"""The law for two ranks: any drafter, chunks, company and steps in flight, the same tokens.

Ranks are threads here; tests/unit/engine/test_ranks.py has them as processes.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from helpers.checkpoints import head_tensors, write_llama, write_safeailab
from helpers.harness import request
from helpers.recorded import RecordedLogits
from helpers.thread_ranks import engine_over_threads
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine

SIZES = {
    "vocab_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
}
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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    head = head_tensors(**SIZES)
    return {
        "target": write_llama(folder / "target", **SIZES),
        "other": write_llama(folder / "other", seed=9, **SIZES),
        "head": write_safeailab(folder / "head", head, **SIZES | {"num_hidden_layers": 1}),
    }


def speculation(files, method):
    if method in ("self", "other"):
        path = files["target" if method == "self" else "other"]
        return {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    if method == "eagle3":
        return {"method": "eagle3", "model": str(files["head"]), "num_speculative_tokens": 2}
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    return None


def requests():
    """Prompts around the edges of blocks and chunks, some that repeat themselves."""
    chooser = random.Random(5)
    for i, length in enumerate((1, 7, 16, 17, 33, 40)):
        period = 1 + i % 3
        pattern = [chooser.randrange(48) for _ in range(period)]
        prompt = (pattern * length)[:length]
        yield request(f"r{i}", prompt, MAX_TOKENS, seed=i, **PARAMS[i % len(PARAMS)])


class Answers(dict):
    """Tokens and log-probabilities by request, and what was offered and accepted."""

    offered = accepted = 0


def drive(core) -> Answers:
    answers = Answers()
    for item in requests():
        core.add_request(item)
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
                core.release(update.request_id)
    core.scheduler.check_integrity()
    return answers


def answer(files, method="plain", **options) -> Answers:
    config = EngineConfig.from_options(
        model=str(files["target"]),
        speculative_config=speculation(files, method),
        **OPTIONS | options,
    )
    if config.tensor_parallel_size == 1:
        return drive(build_engine(config))
    with engine_over_threads(config) as (core, _):
        return drive(core)


@pytest.fixture(scope="module")
def truth(files):
    """Every request alone in its batch, plainly."""
    return answer(files, max_num_seqs=1)


@pytest.mark.parametrize(
    ("method", "steps_in_flight", "max_num_seqs", "chunk"),
    [
        ("plain", 1, 6, 64),
        ("plain", 3, 3, 16),
        ("ngram", 1, 1, 16),
        ("ngram", 2, 6, 32),
        ("self", 3, 6, 16),
        ("self", 1, 2, 64),
        ("other", 2, 4, 32),
        ("eagle3", 1, 6, 16),
        ("eagle3", 2, 3, 64),
    ],
)
def test_the_same_tokens(files, truth, method, steps_in_flight, max_num_seqs, chunk):
    answers = answer(
        files,
        method,
        steps_in_flight=steps_in_flight,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=chunk,
    )
    assert answers == truth
    assert (answers.offered > 0) == (method != "plain")


def test_scarce_memory_and_preemption_change_nothing(files, truth):
    options = OPTIONS | {"num_kv_blocks": 10, "max_num_seqs": 6}
    config = EngineConfig.from_options(
        model=str(files["target"]), speculative_config=speculation(files, "self"), **options
    )
    with engine_over_threads(config) as (core, _):
        assert drive(core) == truth
        assert core._runner.num_swaps


def test_a_drafter_that_is_the_target_is_always_right(files, monkeypatch):
    """It runs whole on rank 0, so its logits differ by rounding alone."""
    plain = [item for item in requests() if item.params.top_p == 1]
    monkeypatch.setitem(globals(), "requests", lambda: plain)
    answers = answer(files, "self")
    assert answers.accepted == answers.offered > 0


def test_logits_are_near_those_of_one_rank_and_not_the_same(files):
    """The degree is part of the arithmetic: the law holds for each by itself."""
    rows = {}
    for size in (1, 2):
        config = EngineConfig.from_options(
            model=str(files["target"]), **OPTIONS | {"tensor_parallel_size": size}
        )
        found = rows[size] = {}
        record = partial(_recorded, found)
        if size == 1:
            record(build_engine(config))
        else:
            with engine_over_threads(config) as (core, _):
                record(core)
    assert rows[1].keys() == rows[2].keys()
    differ = 0
    for where, row in rows[1].items():
        torch.testing.assert_close(rows[2][where], row, rtol=1e-4, atol=1e-4)
        differ += not torch.equal(rows[2][where], row)
    assert differ


def _recorded(found, core):
    """Raw logits of the first emitted token of every prompt."""
    leading = core._runner
    runner = getattr(leading, "_inner", leading)
    recorded = RecordedLogits(runner.verifier)
    object.__setattr__(runner, "verifier", recorded)
    drive(core)
    found |= {where: row for where, row in recorded.rows.items() if where[1] == len(where[0])}

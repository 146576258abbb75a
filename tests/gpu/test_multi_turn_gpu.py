"""A chat on a GPU: blocks that graphs filled with emitted tokens serve the next turn.

What is compared is as on the CPU (tests/e2e/test_multi_turn.py); in eager mode the logits of
every emitted token too. Where graphs verify, log-probabilities say what KV they left.
"""

from __future__ import annotations

import pytest
from gpu_files import (
    HYBRID_SIZES,
    OPTIONS,
    SIZES,
    speculation,
    write_files,
    write_hybrid_target,
)

from helpers.hybrids import hybrid_config
from helpers.turns import Talk, check_turns, start
from sametoken.scheduler import kept_states

BLOCK_SIZE = 16
REPLIES = ((5, 600, 7), tuple(range(40, 63)))
TALK_OPTIONS = OPTIONS | {"max_num_seqs": 4, "block_size": BLOCK_SIZE}
COLD = {"enable_prefix_caching": False}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("target"), "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def plain(files):
    return start(files["target"], enforce_eager=True, **TALK_OPTIONS | COLD)


def talk(temperature: float) -> Talk:
    """An opening of its own for each temperature, so that their blocks stay apart."""
    first = round(10 * temperature)
    opening = tuple((first + 37 * i * i) % SIZES["vocab_size"] for i in range(45))
    return Talk(opening, REPLIES, 60, BLOCK_SIZE, temperature, stop_after=30)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("method", ["plain", "ngram", "self", "eagle3"])
def test_every_turn_is_that_of_a_cold_engine(files, plain, method, eager):
    options = TALK_OPTIONS | {
        "enforce_eager": eager,
        "steps_in_flight": 1 if eager else 2,
        "speculative_config": speculation(files)[method],
    }
    hot, cold = start(files["target"], **options), start(files["target"], **options | COLD)
    for temperature in (0.0, 0.8):
        words = talk(temperature)
        turns = check_turns(words, hot, lambda: cold, lambda: plain)
        hits = [turn.hot.metrics.num_cached_tokens for turn in turns]
        assert hits[0] == 0
        assert hits[1] >= len(words.opening)
        assert hits[2] > hits[1]
        for turn in turns:
            ours, fresh = turn.hot.metrics.speculation, turn.cold.metrics.speculation
            if method == "self":
                assert ours.num_draft_tokens > 0
                assert ours.accepted_per_position == ours.offered_per_position
            if eager:
                assert ours == fresh


@pytest.mark.parametrize("method", ["plain", "self"])
def test_logprobs_after_a_hit_are_those_of_a_cold_engine(files, plain, method):
    """The KV of both prompt and answer was written by graphs."""
    spec = speculation(files)[method]
    hot = start(files["target"], **TALK_OPTIONS, speculative_config=spec)
    words = talk(0.8)
    answer = words.ask(hot.llm, words.opening).outputs[0].token_ids
    prompt = (*words.opening, *answer, *REPLIES[0])
    found = words.ask(hot.llm, prompt, logprobs=5)
    expected = words.ask(plain.llm, prompt, logprobs=5)
    assert found.metrics.num_cached_tokens >= len(words.opening)
    assert expected.metrics.num_cached_tokens == 0
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs


HYBRID_DRAFTS = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    config = hybrid_config("qwen3_5", **HYBRID_SIZES)
    return write_hybrid_target(tmp_path_factory.mktemp("hybrid"), config)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("method", HYBRID_DRAFTS)
def test_a_hybrid_s_turns_are_those_of_a_cold_engine(hybrid, method, eager, monkeypatch):
    """States are kept between captured steps, at every second block of an answer."""
    monkeypatch.setattr(kept_states, "INTERVAL", 2)
    options = TALK_OPTIONS | {
        "enforce_eager": eager,
        "steps_in_flight": 1 if eager else 2,
        "speculative_config": HYBRID_DRAFTS[method],
    }
    hot, cold = start(hybrid, **options), start(hybrid, **options | COLD)
    truth = start(hybrid, enforce_eager=True, **TALK_OPTIONS | COLD)
    for temperature in (0.0, 0.8):
        first = round(10 * temperature)
        opening = tuple((first + 37 * i * i) % SIZES["vocab_size"] for i in range(45))
        words = Talk(
            opening, REPLIES, 60, BLOCK_SIZE, temperature, stop_after=40, kept_every=2 * BLOCK_SIZE
        )
        turns = check_turns(words, hot, lambda: cold, lambda: truth)
        hits = [turn.hot.metrics.num_cached_tokens for turn in turns]
        assert hits[0] == 0
        assert hits[2] > hits[1] > len(opening)
        if eager:
            for turn in turns:
                assert turn.hot.metrics.speculation == turn.cold.metrics.speculation

"""Log-probabilities of the policy, the distribution that tokens are chosen from; and of prompts."""

from __future__ import annotations

import math
from dataclasses import replace

import httpx
import pytest

from helpers.chat_model import write_chat_model
from helpers.checkpoints import write_llama
from helpers.events import events, merged_chat
from helpers.http_server import running_server
from helpers.updates import NGRAM, PROMPTS, engine, params
from sametoken import SamplingParams

POLICY = params(14, temperature=0.7, top_k=4, repetition_penalty=1.2, logprobs=4)


def answers(llm, prompts, wanted: SamplingParams) -> list:
    return [one.outputs[0] for one in llm.generate(prompts, wanted)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "llama", eos_token_id=22)


def test_they_are_those_of_the_chosen_distribution_with_drafts_and_without(llama):
    mode = {"logprobs_mode": "processed_logprobs"}
    plain, drafting, raw = engine(llama, **mode), engine(llama, NGRAM, **mode), engine(llama, NGRAM)
    found = answers(plain, PROMPTS, POLICY)
    assert answers(drafting, PROMPTS, POLICY) == found
    alone = [answers(drafting, prompt, POLICY)[0] for prompt in PROMPTS]
    assert [(one.token_ids, one.logprobs) for one in alone] == [
        (one.token_ids, one.logprobs) for one in found
    ]
    unprocessed = answers(raw, PROMPTS, POLICY)
    for one, other in zip(found, unprocessed, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs != other.logprobs
        for token_id, candidates in zip(one.token_ids, one.logprobs, strict=True):
            assert candidates[token_id].rank <= 4
            kept = sum(math.exp(candidate.logprob) for candidate in candidates.values())
            assert kept == pytest.approx(1, abs=1e-5)


def test_without_processing_both_are_the_same(llama):
    bare = replace(POLICY, temperature=1.0, top_k=0, repetition_penalty=1.0)
    for wanted in (bare, replace(bare, temperature=0.0)):
        pair = [
            answers(engine(llama, logprobs_mode=mode), PROMPTS, wanted)
            for mode in ("raw_logprobs", "processed_logprobs")
        ]
        assert pair[0] == pair[1]


def test_completions_of_a_prompt_share_its_computation_and_its_log_probabilities(llama):
    prompt = {"prompt_token_ids": [0, 1, 4] * 10}
    wanted = params(4, n=3, prompt_logprobs=2)
    small = {"max_num_batched_tokens": 8, "prefill_chunk_size": 8}
    llm, alone = engine(llama, NGRAM, **small), engine(llama, NGRAM, **small)
    (found,) = llm.generate(prompt, wanted)
    (one,) = alone.generate(prompt, replace(wanted, n=1))
    (plain,) = alone.generate(prompt, replace(wanted, prompt_logprobs=None))
    assert found.prompt_logprobs == one.prompt_logprobs
    assert len(found.prompt_logprobs) == 30
    assert found.outputs == plain.outputs
    # The others start after blocks of the first, of four tokens: beside its last chunk, and later.
    assert llm._engine.scheduler.prefix_cache_hits == 24 + 28


def test_what_a_trainer_reads_of_a_server(tmp_path):
    """The request of TRL's client: ids in, ids and log-probabilities by id out."""
    model = write_chat_model(tmp_path / "model")
    body = {
        "prompt": [[97, 98, 99], [100, 101]],
        "n": 2,
        "max_tokens": 6,
        "top_k": 5,
        "temperature": 0.9,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    with running_server(model, engine={"logprobs_mode": "processed_logprobs"}) as server:
        choices = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]
        chat = {
            "messages": [{"role": "user", "content": "the"}],
            "logprobs": True,
            "top_logprobs": 2,
            **{name: body[name] for name in ("max_tokens", "return_tokens_as_token_ids")},
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat | {"stream": True})
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == body["prompt"]
    for choice in choices:
        names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[one] for one in names]
    found = merged_chat(events(answer))[0]["logprobs"]
    assert len(found) == 6
    for entry in found:
        assert entry["token"].startswith("token_id:")
        assert [one["token"].startswith("token_id:") for one in entry["top_logprobs"]] == [True] * 2

"""Workloads, and what a server is asked of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sametoken.bench.workload import (
    PRESETS,
    RequestSource,
    Server,
    ServingWorkload,
    Workload,
    read_prompts,
)
from sametoken.errors import ConfigError

VOCAB = 5000


def test_random_requests_differ_and_come_again_with_the_seed():
    workload = Workload(input_len=20, output_len=7, seed=3, temperature=0.5)
    first, again = (RequestSource(workload, VOCAB).take(4) for _ in range(2))
    assert first == again
    assert RequestSource(Workload(input_len=20, seed=4), VOCAB).take(4)[0] != first[0]
    for what in ("request_id", "prompt_token_ids"):
        assert len({getattr(request, what) for request in first}) == 4
    assert len({request.params.seed for request in first}) == 4


def test_requests_end_by_length_alone():
    (request,) = RequestSource(Workload(input_len=20, output_len=7), VOCAB).take(1)
    assert len(request.prompt_token_ids) == 20
    assert request.max_total_tokens == 27
    assert request.stop_token_ids == ()
    (short,) = RequestSource(Workload(input_len=20, output_len=7), VOCAB).take(1, 3)
    assert short.max_total_tokens == 23


@pytest.mark.parametrize(("vocab", "low", "high"), [(VOCAB, 1000, 4000), (50, 0, 50)])
def test_special_tokens_at_the_ends_of_a_large_vocabulary_are_left_out(vocab, low, high):
    (request,) = RequestSource(Workload(input_len=4000), vocab).take(1)
    ids = request.prompt_token_ids
    assert low <= min(ids) < low + 50
    assert high - 50 <= max(ids) < high


def test_given_prompts_are_used_in_turn():
    workload = Workload(prompts=((1, 2), (3,)), output_len=4)
    requests = RequestSource(workload, VOCAB).take(3)
    assert [r.prompt_token_ids for r in requests] == [(1, 2), (3,), (1, 2)]
    assert workload.longest == 6


def test_the_peer_preset_is_what_peers_were_measured_with():
    peer = PRESETS["peer"]
    assert (peer.input_len, peer.output_len, peer.temperature) == (512, 256, 0.0)
    assert peer.concurrency == (1, 8, 64)


@pytest.mark.parametrize(
    "changes",
    [
        *({"input_len": 0}, {"output_len": 0}, {"concurrency": ()}, {"concurrency": (1, 0)}),
        *({"temperature": 200.0}, {"temperature": float("nan")}, {"seed": 2**64}),
    ],
)
def test_impossible_numbers_are_refused(changes):
    with pytest.raises(ConfigError, match="is not possible"):
        Workload(**changes)


def test_prompts_come_as_texts_ids_and_objects(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ["ab", [1, 2], {"prompt": "b"}, {"prompt_token_ids": [7]}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    prompts = read_prompts(path, lambda text: [ord(letter) for letter in text], 128)
    assert prompts == ((97, 98), (1, 2), (98,), (7,))


@pytest.mark.parametrize("text", ["", "{", "3", "[]", "[-1]", "[true]", '{"text": "a"}', '""'])
def test_files_of_anything_else_are_refused(tmp_path, text):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        read_prompts(path, lambda text: [], 9)
    with pytest.raises(ConfigError, match="nowhere"):
        read_prompts(tmp_path / "nowhere", lambda text: [], 9)


def test_a_small_dataset_is_used_again(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a"\n"b"')
    workload = ServingWorkload(dataset="custom", path=path, num_prompts=5)
    assert workload.prompts() == ["a", "b", "a", "b", "a"]
    assert not workload.is_chat


def test_random_prompts_have_the_length_that_is_asked():
    prompts = ServingWorkload(dataset="random", num_prompts=3, input_len=7).prompts()
    assert [len(prompt.split()) for prompt in prompts] == [7, 7, 7]
    assert len(set(prompts)) == 3


def test_questions_are_asked_in_chat_unless_told_otherwise():
    assert ServingWorkload(dataset="gsm8k").is_chat
    assert not ServingWorkload(dataset="gsm8k", api="completions").is_chat
    assert ServingWorkload(dataset="random", api="chat").is_chat


@pytest.mark.parametrize(
    "given", [{"num_prompts": 0}, {"warmup": -1}, {"repeats": 0}, {"output_len": 0}, {"api": "rpc"}]
)
def test_impossible_values_are_refused(given):
    with pytest.raises(ConfigError):
        ServingWorkload(**given)


def test_a_servers_address():
    assert Server("http://host:1/v1/").url == "http://host:1"
    assert Server(extra_body='{"top_k": 3}').extra == {"top_k": 3}
    addresses = ({"url": "host:1"}, {"url": "http://"}, {"extra_body": "[1]"})
    for wrong in (*addresses, {"api_key": "clé"}, {"timeout": -1.0}, {"timeout": float("nan")}):
        with pytest.raises(ConfigError):
            Server(**wrong)


def test_a_file_is_not_served_under_the_name_of_a_shipped_dataset():
    with pytest.raises(ConfigError, match=r"'mt-bench' takes no file, .* Give --dataset custom"):
        ServingWorkload(path=Path("prompts.jsonl"))

"""What a server is asked: datasets gone through again, chat where it is meant."""

from __future__ import annotations

import pytest

from sametoken.bench.workload import Server, ServingWorkload
from sametoken.errors import ConfigError


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
    for wrong in ({"url": "host:1"}, {"url": "http://"}, {"extra_body": "[1]"}):
        with pytest.raises(ConfigError):
            Server(**wrong)

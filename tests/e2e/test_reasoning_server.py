"""Constrained answers that reason first, from a real server with a tiny model."""

from __future__ import annotations

import json

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from helpers.chat_model import CHAT_TEMPLATE, SCHEMA, SPECIAL, byte_tokenizer, write_chat_model
from helpers.http_server import running_server

TOKENS = byte_tokenizer((*SPECIAL, "<think>", "</think>"))
END = TOKENS.token_to_id("</think>")
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3}
PICK = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
#: A small random model ends its reasoning by chance, which this helps along.
BIAS = {str(END): 3.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = write_chat_model(
        tmp_path_factory.mktemp("served") / "model", vocab_size=TOKENS.get_vocab_size()
    )
    PreTrainedTokenizerFast(
        tokenizer_object=TOKENS, eos_token=SPECIAL[0], chat_template=CHAT_TEMPLATE
    ).save_pretrained(path)
    options = {"engine": {"speculative_config": NGRAM}, "reasoning_parser": "deepseek_r1"}
    with running_server(path, **options) as running:
        yield running


def ask(server, seed: int, k: int, **fields) -> dict:
    """The only choice of an answer with at most k drafts a step."""
    body = {
        "messages": [{"role": "user", "content": "the inner the other the inner the other"}],
        "seed": seed,
        "temperature": 0.8,
        "max_tokens": 200,
        "logit_bias": BIAS,
        "speculative": {"num_speculative_tokens": k},
        "return_token_ids": True,
    }
    with httpx.Client(timeout=120) as client:
        answer = client.post(f"{server.url}/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


@pytest.mark.parametrize("seed", range(2))
def test_a_json_answer_reasons_first_and_drafts_change_no_token(server, seed):
    choice, plain = (ask(server, seed, k, response_format=FORM) for k in (6, 0))
    assert choice == plain
    assert choice["finish_reason"] == "stop"
    message = choice["message"]
    assert set(json.loads(message["content"])) == {"name", "old"}
    ids = choice["token_ids"]
    thought = TOKENS.decode(ids[: ids.index(END)], skip_special_tokens=False)
    assert message["reasoning"] == thought.removeprefix("<think>") != ""


def test_an_answer_continued_behind_its_reasoning_is_constrained_at_once(server):
    begun = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": "<think>ann</think>"},
    ]
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    choice, plain = (
        ask(server, 1, k, messages=begun, **ends, response_format=FORM) for k in (6, 0)
    )
    assert choice == plain
    message = choice["message"]
    assert (message["reasoning"], set(json.loads(message["content"]))) == (None, {"name", "old"})
    assert TOKENS.decode(choice["token_ids"]) == message["content"]


def test_a_forced_call_reasons_first(server):
    choice = ask(server, 1, 6, tools=[PICK], tool_choice="required", parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert set(json.loads(call["function"]["arguments"])) == {"name", "old"}
    assert choice["message"]["reasoning"]

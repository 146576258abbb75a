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


MESSAGES = [{"role": "user", "content": "the inner the other the inner the other"}]


def ask(server, seed: int, k: int, **fields) -> dict:
    """The only choice of an answer with at most k drafts a step."""
    body = {
        "messages": MESSAGES,
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


#: Without the end of the reasoning by chance.
NEVER = {"logit_bias": {str(END): -99.0}, "max_tokens": 20}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("budget", [0, 7])
def test_a_budget_ends_the_reasoning_and_drafts_change_no_token(server, temperature, budget):
    asked = {"temperature": temperature, "logprobs": True, "top_logprobs": 2} | NEVER
    free, choice, plain = (
        ask(server, 1, k, **asked, thinking_token_budget=tokens)
        for tokens, k in ((-1, 6), (budget, 6), (budget, 0))
    )
    assert choice == plain
    ids = choice["token_ids"]
    assert (ids[:budget], ids[budget]) == (free["token_ids"][:budget], END)
    assert len(ids) == len(free["token_ids"]) == 20
    assert choice["message"]["reasoning"] == (TOKENS.decode(ids[:budget]) or None)
    assert choice["message"]["content"] == TOKENS.decode(ids[budget + 1 :])
    # Log-probabilities are the model's, to which the end is as improbable as it was.
    told = choice["logprobs"]["content"]
    assert [one["token"] for one in told][budget] == "</think>"
    assert told[budget]["logprob"] < min(one["logprob"] for one in told[budget]["top_logprobs"])
    assert ask(server, 1, 6, **asked, thinking_token_budget=20) == free


def test_a_form_and_a_forced_call_begin_behind_a_budget(server):
    fields = {"thinking_token_budget": 5} | NEVER | {"max_tokens": 200}
    choice, plain = (ask(server, 1, k, response_format=FORM, **fields) for k in (6, 0))
    assert choice == plain
    assert choice["token_ids"].index(END) == 5
    assert set(json.loads(choice["message"]["content"])) == {"name", "old"}
    call = ask(server, 1, 6, tools=[PICK], tool_choice="required", **fields)
    assert call["token_ids"].index(END) == 5
    assert call["message"]["tool_calls"][0]["function"]["name"] == "pick"


def test_messages_responses_and_completions_have_the_tokens_of_the_chat(server):
    """Also a text with the marks of the tokenizer alone, as offline."""
    more = {"temperature": 0.8, "seed": 1, "logit_bias": NEVER["logit_bias"]}
    message = ask(server, 1, 6, thinking_token_budget=5, **NEVER)["message"]
    said = [message["reasoning"], message["content"]]
    with httpx.Client(timeout=120, base_url=server.url) as client:
        thinking = {"type": "enabled", "budget_tokens": 5}
        body = {"messages": MESSAGES, "max_tokens": 20, "thinking": thinking} | more
        blocks = client.post("/v1/messages", json=body).json()["content"]
        body = {"input": MESSAGES, "max_output_tokens": 20, "thinking_token_budget": 5} | more
        items = client.post("/v1/responses", json=body).json()["output"]
        body = {"prompt": "<think>the ", "max_tokens": 20, "thinking_token_budget": 6} | more
        body |= {"return_token_ids": True}
        (text,) = client.post("/v1/completions", json=body).json()["choices"]
    assert [blocks[0]["thinking"], blocks[1]["text"]] == said
    assert [item["content"][0]["text"] for item in items] == said
    in_prompt = len(TOKENS.encode("the ").ids)
    assert text["token_ids"].index(END) == 6 - in_prompt

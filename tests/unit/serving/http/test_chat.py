from __future__ import annotations

import json

import pytest

from helpers.events import events, merged_chat
from helpers.fake_engine import FakeEngine

USER = [{"role": "user", "content": "What is 1 + 2?"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = "héllo wörld 🙂 done"
NAMED = {"type": "function", "function": {"name": "add"}}


def both(serve, said: str, **body) -> tuple[dict, list[dict]]:
    """The answer to a request without and with a stream."""
    client = serve(FakeEngine(said))
    request = {"messages": USER} | body
    whole = client.post("/v1/chat/completions", json=request)
    assert whole.status_code == 200, whole.text
    stream = client.post("/v1/chat/completions", json=request | {"stream": True})
    return whole.json(), events(stream)


def calls_of(message: dict) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (TEXT, {}),
        (TEXT, {"n": 2, "logprobs": True, "top_logprobs": 2}),
        (TEXT, {"logprobs": True, "return_token_ids": True, "stop": ["wör"]}),
        (TEXT, {"tools": [ADD], "logprobs": True}),
        (f"I will add.\n{CALL}\n{CALL}", {"tools": [ADD], "logprobs": True}),
        (CALL[:-20], {"tools": [ADD], "return_token_ids": True}),
        (CALL, {"tools": [ADD], "tool_choice": "none"}),
        ('{"a": 1}', {"tools": [ADD], "tool_choice": NAMED}),
        ('[{"name": "add", "parameters": {"a": 1}}]', {"tools": [ADD], "tool_choice": "required"}),
        ("", {}),
    ],
)
def test_a_stream_adds_up_to_the_whole(serve, said, body):
    whole, chunks = both(serve, said, **body)
    found = merged_chat(chunks)
    assert len(found) == len(whole["choices"])
    for choice in whole["choices"]:
        streamed, message = found[choice["index"]], choice["message"]
        assert streamed["content"] == (message["content"] or "")
        assert [(c["name"], c["arguments"]) for c in streamed["calls"]] == calls_of(message)
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["logprobs"] == (choice["logprobs"] or {}).get("content", [])
        assert streamed["token_ids"] == choice.get("token_ids", [])


def test_tool_calls(serve):
    whole, chunks = both(serve, f"Let me add.\n{CALL}", tools=[ADD])
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me add."
    assert calls_of(choice["message"]) == [("add", '{"a": 1}')]
    deltas = [
        call
        for chunk in chunks
        for one in chunk["choices"]
        for call in one["delta"].get("tool_calls") or []
    ]
    assert deltas[0]["function"]["name"] == "add"
    assert deltas[0]["type"] == "function"
    assert len(deltas) > 2, "arguments are not streamed"
    assert all("id" not in call and "name" not in call["function"] for call in deltas[1:])


def test_content_is_null_beside_a_bare_call(serve):
    whole, _ = both(serve, CALL, tools=[ADD])
    assert whole["choices"][0]["message"]["content"] is None


def test_forced_calls(serve):
    whole, _ = both(
        serve, '[{"name": "add", "parameters": {"a": 1}}]', tools=[ADD], tool_choice="required"
    )
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], calls_of(choice["message"])) == (
        "tool_calls",
        [("add", '{"a": 1}')],
    )
    whole, _ = both(serve, '{"a": 2}', tools=[ADD], tool_choice=NAMED)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], calls_of(choice["message"])) == ("stop", [("add", '{"a": 2}')])


def test_the_template_sees_tools_and_earlier_calls(serve):
    engine = FakeEngine()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    body = {"messages": messages, "tools": [ADD], "max_completion_tokens": 4}
    assert serve(engine).post("/v1/chat/completions", json=body).status_code == 200
    ((prompt, params),) = engine.seen
    assert json.dumps(ADD) in prompt.text
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in prompt.text
    assert "<|im_start|>tool\n3<|im_end|>" in prompt.text
    assert prompt.text.endswith("<|im_start|>assistant\n")
    assert params.max_tokens == 4


def test_the_first_chunk_names_the_role_and_the_last_the_reason(serve):
    _, chunks = both(serve, "hi", stream_options=None)
    first, *_, last = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_usage_and_statistics_when_asked_for(serve):
    body = {"messages": USER, "include_speculation_stats": True, "return_token_ids": True}
    client = serve(FakeEngine("hello"))
    whole = client.post("/v1/chat/completions", json=body).json()
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["speculation"]["num_accepted_tokens"] == 4
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    first, *_, last = events(client.post("/v1/chat/completions", json=body))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert (last["usage"], last["speculation"]) == (whole["usage"], whole["speculation"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"functions": []}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(serve, body, param):
    answer = serve().post("/v1/chat/completions", json={"messages": USER} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_unknown_syntax_is_refused_before_anything_runs(serve):
    engine = FakeEngine()
    engine.tokenizer.hf.chat_template = "{{ messages[0].content }}"
    body = {"messages": USER, "tools": [ADD]}
    answer = serve(engine).post("/v1/chat/completions", json=body)
    assert "--tool-call-parser" in answer.json()["error"]["message"]
    assert (
        serve(engine, tool_call_parser="llama3_json")
        .post("/v1/chat/completions", json=body)
        .is_success
    )
    assert (
        not serve(FakeEngine(), tool_call_parser="none")
        .post("/v1/chat/completions", json=body)
        .is_success
    )
    assert len(engine.seen) == 1


def test_lone_surrogates_are_the_client_s_error(serve):
    client = serve()
    bodies = {
        '{"messages": [{"role": "user", "content": "\\ud800"}]}': 400,
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}': 400,
        '{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}': 400,
        '{"messages": [{"role": "user", "content": "x"}], "model": "\\ud800"}': 400,
    }
    for body, status in bodies.items():
        headers = {"Content-Type": "application/json"}
        answer = client.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == status, body
        assert answer.json()["error"]["message"]

"""``/v1/messages`` over an engine that says what a test wants, read as Anthropic's clients do."""

from __future__ import annotations

import pytest
from pydantic_core import from_json

from helpers.events import named_events
from helpers.fake_engine import FakeEngine

PATH = "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "é", "b": 1}}\n</tool_call>'
#: As Claude Code sends them unasked.
UNASKED = {
    "betas": ["context-management-2025-06-27"],
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u"},
    "speed": "standard",
    "of_a_later_beta": {"a": 1},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}


def post(serve, said: str | FakeEngine, server=None, path=PATH, **body):
    return serve(said, **(server or {})).post(path, json=HI | {"max_tokens": 300} | body)


def whole(serve, said: str | FakeEngine, server=None, **body) -> dict:
    answer = post(serve, said, server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def put_together(events: list[dict]) -> dict:
    """The message that a client makes of a stream's events."""
    first, *events, delta, last = events
    assert (first["type"], delta["type"]) == ("message_start", "message_delta")
    assert last == {"type": "message_stop"}
    message, is_open = first["message"], False
    assert (message["content"], message["stop_reason"]) == ([], None)
    for place, event in enumerate(events):
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, arguments = True, ""
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            assert ("signature" in events[place - 1]["delta"]) == (block["type"] == "thinking")
            if block["type"] == "tool_use":
                block["input"] = from_json(arguments or "{}", allow_partial=True)
            continue
        kind, name = event["delta"]
        assert event["delta"][kind].removesuffix("_delta") in (
            "input_json",
            "signature",
            block["type"],
        )
        if name == "partial_json":
            arguments += event["delta"][name]
        else:
            block[name] += event["delta"][name]
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


def test_a_text_comes_as_it_grows(serve):
    events = named_events(post(serve, FakeEngine("hello world", window=1), stream=True))
    texts = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert len(texts) > 5
    assert "".join(texts) == "hello world"


CALLS = {"tool_call_parser": "hermes"}
REASONS = {"reasoning_parser": "deepseek_r1"}
CASES = {
    "text": ("héllo wörld 🙂", {}, {}, ["text"], "end_turn"),
    "nothing": ("", {}, {}, [], "end_turn"),
    "cut": ("héllo wörld", {}, {"max_tokens": 4}, ["text"], "max_tokens"),
    "a full context": (
        "x" * 600,
        {},
        {"max_tokens": 600},
        ["text"],
        "model_context_window_exceeded",
    ),
    "stop": ("hello world", {}, {"stop_sequences": ["wor", "x"]}, ["text"], "stop_sequence"),
    "reasoning": ("<think>Hm.</think>3", REASONS, {}, ["thinking", "text"], "end_turn"),
    "calls": (
        f"<think>Hm.</think>Sure.\n{CALL}{CALL}",
        CALLS | REASONS,
        {"tools": [ADD]},
        ["thinking", "text", "tool_use", "tool_use"],
        "tool_use",
    ),
    "one call": (
        CALL + CALL,
        CALLS,
        {"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ["tool_use"],
        "tool_use",
    ),
    "a cut call": (CALL, CALLS, {"tools": [ADD], "max_tokens": 52}, ["tool_use"], "max_tokens"),
    "a forced call": (
        '{"a": 2}',
        {},
        {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}},
        ["tool_use"],
        "tool_use",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_adds_up_to_the_whole(serve, case):
    said, server, body, kinds, stop = CASES[case]
    message = whole(serve, said, server, **body)
    streamed = put_together(named_events(post(serve, said, server, stream=True, **body)))
    assert [block["type"] for block in message["content"]] == kinds
    assert message["stop_reason"] == stop
    assert message["stop_sequence"] == ("wor" if case == "stop" else None)
    ids = [
        block.pop(name)
        for one in (message, streamed)
        for block in one["content"]
        for name in ("id", "signature")
        if name in block
    ]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    assert streamed.pop("id") != message.pop("id")
    assert streamed == message


def test_blocks_of_every_kind(serve):
    thought, text, call, again = whole(serve, *CASES["calls"][:2], tools=[ADD])["content"]
    # Pydantic AI sends reasoning without a signature back as a text of the user.
    assert thought.pop("signature")
    assert thought == {"type": "thinking", "thinking": "Hm."}
    assert text == {"type": "text", "text": "Sure."}
    assert call | {"id": ""} == {
        "type": "tool_use", "id": "", "name": "add", "input": {"a": "é", "b": 1},
    }  # fmt: skip
    assert again["id"] != call["id"]
    (cut,) = whole(serve, CALL, CALLS, tools=[ADD], max_tokens=52)["content"]
    assert cut["input"] == {"a": "é"}


HISTORY = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
        {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "aa"},
                {"type": "text", "text": "I "},
                {"type": "text", "text": "add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": "é"}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Well?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": "3"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "way"}],
                    "is_error": True,
                },
            ],
        },
        {"role": "system", "content": "5 tokens left."},
    ],
}  # fmt: skip
CALLED = [
    {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}},
    {"id": "t2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
]
CHAT = [
    {"role": "system", "content": "Be brief.\nBe kind."},
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "I add.", "reasoning": "Hm.", "tool_calls": CALLED},
    {"role": "tool", "content": "3", "tool_call_id": "t1"},
    {"role": "tool", "content": "no\nway", "tool_call_id": "t2"},
    {"role": "user", "content": "Well?\n5 tokens left."},
]
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
#: Written at the prompt's end, beside what the template writes itself.
VARIABLES = (
    "{{ enable_thinking }}|{{ reasoning_effort }}"
    "{% for one in messages %}|{{ one.reasoning }}|{{ one.tool_call_id }}{% endfor %}"
)
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "3"}
ANSWERED = {"role": "user", "content": [RESULT]}
SAME = {
    "a conversation": (HISTORY, {"messages": CHAT}),
    "results alone": (
        {"messages": [*HI["messages"], HISTORY["messages"][3], ANSWERED]},
        {"messages": [*HI["messages"], CHAT[2], CHAT[3]]},
    ),
    "a question without a text": (
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": ""}]},
    ),
    "variables of the template": (
        {"chat_template_kwargs": {"enable_thinking": 7}},
        {"chat_template_kwargs": {"enable_thinking": 7}},
    ),
    "an answer to go on with": (
        {"messages": [*HI["messages"], {"role": "assistant", "content": "I am"}]},
        {
            "messages": [*HI["messages"], {"role": "assistant", "content": "I am"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "sampling": (
        {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "stop_sequences": ["a", "b"], "seed": 1},
        {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "stop": ["a", "b"], "seed": 1},
    ),
    "tools": (
        {"tools": [ADD | {"type": "custom", "cache_control": {}}, SEARCH],
         "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
         "parallel_tool_calls": False},
    ),
    "no call": (
        {"tools": [ADD], "tool_choice": {"type": "none"}},
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "none"},
    ),
    "thinking": (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
    "no thinking": (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
    ),
    "a format": (
        {"thinking": {"type": "adaptive"},
         "output_config": {"format": FORMAT}},
        {"chat_template_kwargs": {"enable_thinking": True},
         "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    "a format as in the beta": (
        {"output_format": FORMAT, "output_config": {}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    "unasked": (UNASKED, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_the_engine_sees_the_chat_of_the_same_conversation(serve, case):
    engine = FakeEngine('{"a": 1}')
    engine.tokenizer.hf.chat_template += VARIABLES
    client = serve(engine)
    asked, chat = SAME[case]
    answer = client.post(PATH, json=HI | {"max_tokens": 9} | asked)
    assert answer.status_code == 200, answer.text
    body = HI | {"max_completion_tokens": 9} | chat
    found = client.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    assert engine.seen[0] == engine.seen[1]
    counted = client.post(f"{PATH}/count_tokens", json=HI | asked).json()
    assert counted == {"input_tokens": len(engine.seen[0][0].token_ids)}


@pytest.mark.parametrize(
    ("thinking", "more", "budget"),
    [
        ({"budget_tokens": 5}, {}, 5),
        ({"budget_tokens": 5}, {"thinking_token_budget": 3}, 3),
        ({"budget_tokens": 5}, {"thinking_token_budget": -1}, None),
        ({"budget_tokens": 7}, {}, 7),
        ({"budget_tokens": 8}, {}, None),
        ({"budget_tokens": 5000}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_budget_of_thinking_binds_if_it_leaves_room_for_a_text(serve, thinking, more, budget):
    engine = FakeEngine("hm", special=("<end>", "<think>", "</think>"))
    body = HI | {"max_tokens": 9, "thinking": {"type": "enabled"} | thinking} | more
    answer = serve(engine, **REASONS).post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    structured = engine.seen[-1][1].structured_outputs
    assert (structured and structured.reasoning.budget) == budget


def test_cached_tokens_are_counted_apart(serve):
    class Cached(FakeEngine):
        def _update(self, *args, **kwargs):
            return super()._update(*args, **kwargs)._replace(num_cached=7)

        def _chunk(self, *args):
            return super()._chunk(*args)._replace(num_cached=7)

    plain = whole(serve, "hello")["usage"]
    found = {
        "input_tokens": plain["input_tokens"] - 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 7,
        "output_tokens": plain["output_tokens"],
    }
    assert whole(serve, Cached("hello"))["usage"] == found
    first, *_ = named_events(post(serve, Cached("hello"), stream=True))
    assert first["message"]["usage"] == found | {"output_tokens": 0}


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (IMAGE, "[a part of type image is left out: you can read only text]"),
        ({"type": "tool_reference", "tool_name": "add"}, "add can be called now"),
    ],
)
def test_the_model_is_told_of_what_a_tool_returned(serve, part, told):
    """Claude Code searches its tools with ``ENABLE_TOOL_SEARCH=true``."""
    engine = FakeEngine("hello")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [part]}
    whole(serve, engine, **in_user(**result))
    assert told in engine.seen[0][0].text


def in_user(**block) -> dict:
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (HI | {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        # Claude Code reads the place of an image, and drops it.
        (in_user(**IMAGE), "messages.0.content.0.image is not supported"),
        (
            in_user(type="tool_result", tool_use_id="t", content=[IMAGE | {"type": "video"}]),
            "messages.0.content.0.tool_result.content.0.video is not supported",
        ),
        (in_user(type="tool_result", tool_use_id="t", content=[{"type": []}]), "content.0.[] is"),
        (
            in_user(type="tool_result", tool_use_id="t", content=[{"type": "tool_reference"}]),
            "content.0.tool_reference is not supported",
        ),
        (in_user(type="tool_use", id="t", name="add", input={}), "of the user"),
        (in_user(type="redacted_thinking", data="aa"), "of the user"),
        (in_user(type="tool_use", id="t", name="add", input="{}"), "messages.0.content.0.input"),
        ({"system": [IMAGE]}, "system.0.image is not supported"),
        ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "lacks 'name'"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "needs tools"),
        ({"tools": [SEARCH]}, "runs no tools of its own ('web_search_20250305')"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"stop": ["x"]}, "use stop_sequences"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
        ({"temprature": 1}, "'temperature'"),
        ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "Send one of them"),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": [USE] * 1025},
                ]
            },
            "has 1025 calls and at most 1024 are allowed",
        ),
        # As Claude Code, Qwen Code and LiteLLM read it.
        (
            in_user(type="text", text="x" * 600),
            "prompt is too long: the prompt has 618 tokens > 511 maximum: this model's maximum "
            "context length is 512 tokens",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(serve, body, told):
    answer = post(serve, "never", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert told in answer.json()["error"]["message"]


def test_a_tool_runner_learns_that_nothing_is_stored(serve):
    """By this code the SDK's runner sends the whole conversation instead."""
    error = post(serve, "never", thread={"type": "create"}).json()["error"]
    assert "thread is not supported" in error["message"]
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_errors_have_the_form_of_their_path(serve):
    key = {"x-api-key": "right"}
    client = serve(
        FakeEngine(failed=True), api_key=("right",), max_request_bytes=1000, root_path="/p"
    )
    short = HI | {"max_tokens": 9}
    long = short | {"system": "x" * 2000}
    answers = [
        (client.post(f"/p{PATH}", json=HI), 401, "authentication_error"),
        (client.post(PATH, headers=key, json=short | {"model": "x"}), 404, "not_found_error"),
        (client.post(PATH, headers=key, content=b"{"), 400, "invalid_request_error"),
        (client.post(PATH, headers=key, json=long), 413, "request_too_large"),
        (client.post(PATH, headers=key, json=short), 500, "api_error"),
        (client.get(f"{PATH}/count_tokens", headers=key), 405, "invalid_request_error"),
    ]  # fmt: skip
    for answer, status, kind in answers:
        assert answer.status_code == status
        told = answer.json()
        assert (told["type"], told["error"]["type"]) == ("error", kind)
        assert set(told["error"]) == {"type", "message"}
    body = short | {"stream": True}
    *_, last = named_events(client.post(PATH, headers=key, json=body))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    other = client.post("/v1/messages_of_others", headers=key, json=body).json()
    assert set(other["error"]) == {"message", "type", "param", "code"}

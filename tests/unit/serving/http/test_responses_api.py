"""``/v1/responses`` over an engine that says what a test wants, read by OpenAI's types."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from helpers.events import named_events
from helpers.fake_engine import FakeEngine
from sametoken.engine.user_inputs import plain_messages
from sametoken.errors import NumericalError
from sametoken.serving.http import other_tools
from sametoken.serving.http.parsed import FoundCall, FoundText, parse_nothing, parsed_of
from sametoken.serving.http.responses_api.conversation import chat_request
from sametoken.serving.http.responses_api.items import ItemWriter
from sametoken.serving.http.responses_api.request import InputItem, ResponsesRequest
from sametoken.serving.http.tools import template_messages

EVENT = TypeAdapter(ResponseStreamEvent)
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
#: As Codex sends an MCP server's functions, and what it has besides.
GROUP = {"type": "namespace", "name": "mcp__sums", "description": "Sums.", "tools": [ADD]}
OTHERS = [
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "image_generation", "name": "paint"},
]
#: As Codex sends its own, by which a model edits files.
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "patch", "format": LARK}
PATCHED = '+é "🙂"\n+done'
HERMES, REASONS = {"tool_call_parser": "hermes"}, {"reasoning_parser": "deepseek_r1"}


def call_of(name: str, text: str) -> str:
    """A call of a custom tool as a model writes it, characters beyond ASCII escaped."""
    function = {"name": name, "arguments": {"input": text}}
    return f"<tool_call>\n{json.dumps(function)}\n</tool_call>"


TEXT = "héllo wörld 🙂 done"


def post(serve, said: str | FakeEngine, server=None, **body):
    return serve(said, **(server or {})).post("/v1/responses", json={"input": "hi"} | body)


def whole(serve, said: str | FakeEngine, server=None, **body) -> Response:
    answer = post(serve, said, server, **body)
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json())


def streamed(serve, said: str | FakeEngine, server=None, **body) -> list:
    """The events of a stream, each with its number."""
    answer = post(serve, said, server, stream=True, **body)
    found = [EVENT.validate_python(event) for event in named_events(answer)]
    assert [event.sequence_number for event in found] == [*range(len(found))]
    assert all(getattr(event, "content_index", 0) == 0 for event in found)
    return found


def refused(serve, **body) -> dict:
    answer = post(serve, "never", **body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def without_ids(items) -> list[dict]:
    values = [item.model_dump(exclude_none=True) for item in items]
    return [{k: v for k, v in one.items() if k not in ("id", "call_id")} for one in values]


def built(events) -> list[dict]:
    """Items put together from the deltas alone."""
    items = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                items.append({"type": event.item.type, "id": event.item.id, "text": ""})
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
                | "response.custom_tool_call_input.delta"
            ):
                assert event.item_id == items[event.output_index]["id"]
                items[event.output_index]["text"] += event.delta
    return items


def text_of(item) -> str:
    if item.type == "function_call":
        return item.arguments
    if item.type == "custom_tool_call":
        return item.input
    (part,) = item.content
    return part.text


FORMAT = {"text": {"format": {"type": "json_object"}}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CASES = {
    "text": (TEXT, {}, {}),
    "nothing": ("", {}, {}),
    "cut": (TEXT, {}, {"max_output_tokens": 4}),
    "reasoning": ("<think>Let me héar.</think>It is 3.", REASONS, {}),
    "only reasoning": ("<think>Let me", REASONS, {}),
    "call": (f"Sure.\n{CALL}", HERMES, {"tools": [ADD]}),
    "a call in a namespace": (CALL.replace("add", "mcp__sums__add"), HERMES, {"tools": [GROUP]}),
    "a call of a custom tool": (f"Sure.{call_of('patch', PATCHED)}", HERMES, {"tools": [PATCH]}),
    "a forced call of a custom tool": (
        json.dumps({"input": PATCHED}),
        {},
        {"tools": [PATCH], "tool_choice": {"type": "custom", "name": "patch"}},
    ),
    "calls": (CALL + CALL, HERMES, {"tools": [ADD]}),
    "a call or a format": (CALL, {}, {"tools": [ADD], **FORMAT}),
    "a format or a call": ('{"a": "<tool_call>"}', {}, {"tools": [ADD], **FORMAT}),
    "text after a call": (f"Sure.\n{CALL}\nAnd{CALL} done", HERMES, {"tools": [ADD]}),
    "log-probabilities of several items": (
        f"<think>Hm.</think>Sure.\n{CALL}\nAnd{CALL} done",
        HERMES | REASONS,
        {"tools": [ADD], **LOGPROBS},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_adds_up_to_the_whole(serve, case):
    said, server, body = CASES[case]
    response = whole(serve, said, server, **body)
    events = streamed(serve, said, server, **body)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    last = events[-1]
    assert last.type == f"response.{response.status}"
    assert without_ids(last.response.output) == without_ids(response.output)
    assert last.response.usage == response.usage
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    assert [one["text"] for one in built(events)] == [text_of(item) for item in done]
    assert [one["id"] for one in built(events)] == [item.id for item in done]


def test_items_of_every_kind(serve):
    texts = whole(serve, TEXT)
    assert texts.output_text == TEXT
    assert texts.status == "completed"
    assert texts.output[0].status == "completed"
    thought = whole(serve, *CASES["reasoning"][:2])
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert thought.output[0].content[0].text == "Let me héar."
    assert thought.output_text == "It is 3."
    assert thought.usage.output_tokens_details.reasoning_tokens == len("Let me héar.".encode())
    between = whole(serve, f"Sure.\n{CALL} and more", HERMES, tools=[ADD])
    assert [item.type for item in between.output] == ["message", "function_call", "message"]
    called = whole(serve, f"Sure.\n{CALL}", HERMES, tools=[ADD])
    assert [item.type for item in called.output] == ["message", "function_call"]
    assert called.output[1].name == "add"
    assert json.loads(called.output[1].arguments) == {"a": 1}
    assert called.output[1].call_id != called.output[1].id


def test_a_cut_answer_is_incomplete(serve):
    cut = whole(serve, "a" * 100, max_output_tokens=4)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"
    assert cut.usage.output_tokens == 4


def test_a_response_says_what_was_asked(serve):
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 40,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "temperature": 0.25,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "tool_choice": "none",
        "tools": [ADD],
        "top_p": 0.5,
    }
    answer = post(serve, "{}", **asked).json()
    assert {name: answer[name] for name in asked} == asked
    plain = post(serve, TEXT).json()
    assert plain["temperature"] == 0.5
    assert plain["text"] == {"format": {"type": "text"}}
    assert plain["tool_choice"] == "auto"
    nulls = {"error", "incomplete_details", "previous_response_id", "instructions"}
    assert all(plain[name] is None for name in nulls)
    assert plain["store"] is False


def test_a_response_has_the_id_that_the_client_gave(serve):
    """As with vLLM. Items have ids of their own."""
    response = whole(serve, TEXT, request_id="mine")
    assert response.id == "mine"
    assert "mine" not in response.output[0].id
    events = streamed(serve, TEXT, request_id="mine")
    assert {events[0].response.id, events[-1].response.id} == {"mine"}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, False),
        ({"top_logprobs": 0}, False),
        ({"top_logprobs": 1}, True),
        ({"include": ["message.output_text.logprobs"]}, True),
    ],
)
def test_log_probabilities_are_told_in_either_way(serve, asked, told):
    (item,) = whole(serve, TEXT, **asked).output
    assert bool(item.content[0].logprobs) == told


def test_log_probabilities_are_those_of_the_text(serve):
    (item,) = whole(serve, TEXT, **LOGPROBS).output
    (part,) = item.content
    # The token that ends the answer is one of them.
    assert b"".join(bytes(one.bytes) for one in part.logprobs) == f"{TEXT}<|end|>".encode()
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    events = streamed(serve, TEXT, **LOGPROBS)
    told = [
        one
        for event in events
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [one.token for one in done.logprobs] == [one.token for one in part.logprobs]
    assert [one.token for one in told] == [one.token for one in part.logprobs][: len(told)]
    (item,) = whole(serve, TEXT).output
    assert item.content[0].logprobs is None


def rendered(**body) -> list[dict]:
    messages = chat_request(ResponsesRequest.model_validate(body)).messages
    return plain_messages(template_messages(messages))


def test_items_become_messages():
    found = rendered(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
            },
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "c1",
                "name": "add",
                "arguments": '{"a": 1}',
            },
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "0"}],
            },
            {"type": "message", "role": "assistant", "content": "3."},
            {"type": "message", "role": "assistant", "content": "Or 4."},
            {"role": "developer", "content": "Stop."},
        ],
    )
    assert [one["role"] for one in found] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "assistant", "developer",
    ]  # fmt: skip
    assert [one["content"] for one in found] == [
        "Be brief.", "1 + 2?", "I add.", "3", "0", "3.", "Or 4.", "Stop.",
    ]  # fmt: skip
    assert found[2]["reasoning"] == "Hm."
    assert [call["id"] for call in found[2]["tool_calls"]] == ["c1", "c2"]
    assert found[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert [one["tool_call_id"] for one in found[3:5]] == ["c1", "c2"]


def test_instructions_at_the_beginning_are_one_message():
    """Many templates refuse a second message of the system, or leave it out."""
    first = [{"role": role, "content": role} for role in ("developer", "system", "user")]
    found = rendered(instructions="Be brief.", input=[*first, first[0]])
    assert [(one["role"], one["content"]) for one in found] == [
        ("system", "Be brief.\n\ndeveloper\n\nsystem"),
        ("user", "user"),
        ("developer", "developer"),
    ]
    found = rendered(input=first)
    assert [(one["role"], one["content"]) for one in found] == [
        ("developer", "developer\n\nsystem"),
        ("user", "user"),
    ]


def test_many_instructions_are_joined_once():
    copied = []

    class Counted(str):
        def __add__(self, other):
            copied.append(len(self))
            return Counted(str(self) + other)

    item = InputItem(role="developer", content="b")
    request = ResponsesRequest.model_construct(instructions=Counted("a"), input=[item] * 300)
    (message,) = chat_request(request).messages
    assert message.content == "\n\n".join(("a", *"b" * 300))
    assert sum(copied) < len(message.content)


def test_the_model_is_told_of_an_image_that_a_function_returned():
    """As Codex's view_image does (openai/codex#32267)."""
    output = [{"type": "input_image", "image_url": "x"}]
    (found,) = rendered(input=[{"type": "function_call_output", "call_id": "c", "output": output}])
    assert found["content"] == "[a part of type input_image is left out: you can read only text]"


def test_an_answer_can_be_sent_back(serve):
    """As agents do: the items of an answer, then the results of its calls."""
    engine = FakeEngine(f"Sure.\n{CALL}")
    first = post(serve, engine, HERMES, tools=[ADD]).json()
    (call,) = (item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    items = [{"role": "user", "content": "hi"}, *first["output"], result]
    assert post(serve, engine, HERMES, input=items, tools=[ADD]).status_code == 200
    prompt, called = prompt_of(engine), CALL.replace("\n", "")
    assert "Sure." in prompt
    assert f"{called}<|im_end|>\n<|im_start|>tool\n3<|im_end|>" in prompt


def prompt_of(engine) -> str:
    return engine.tokenizer.decode(engine.seen[-1][0].token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "body",
    [
        {"instructions": "Be brief.", "stream": True},
        {"input": [{"role": "user", "content": "hi"}], "tools": [ADD, *OTHERS, GROUP]},
        {
            "tools": [ADD, GROUP],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ADD]},
        },
    ],
)
def test_tokens_are_counted_as_the_engine_sees_them(serve, body):
    engine = FakeEngine(TEXT)
    client = serve(engine, **HERMES)
    assert client.post("/v1/responses", json={"input": "hi"} | body).status_code == 200
    counted = client.post("/v1/responses/input_tokens", json={"input": "hi"} | body).json()
    num_tokens = len(engine.seen[-1][0].token_ids)
    assert counted == {"object": "response.input_tokens", "input_tokens": num_tokens}
    refused = client.post("/v1/responses/input_tokens", json={"input": [{"role": "x"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


def test_tools_that_are_no_functions_are_left_out(serve, caplog, monkeypatch):
    """Codex sends them to every server (llama.cpp#20156)."""
    monkeypatch.setattr(other_tools._logger, "filters", [])
    engine = FakeEngine(TEXT)
    mixed = [*OTHERS, ADD, GROUP | {"tools": [ADD, *OTHERS]}]
    answer = post(serve, engine, HERMES, tools=mixed)
    assert Response.model_validate(answer.json()).output_text == TEXT
    assert answer.json()["tools"] == [ADD, GROUP]
    sent = prompt_of(engine)
    assert "add" in sent
    assert "paint" not in sent
    assert "'image_generation, local_shell, web_search'" in caplog.text
    assert whole(serve, TEXT, tools=OTHERS, tool_choice="auto").tools == []


@pytest.mark.parametrize("case", ["a call of a custom tool", "a forced call of a custom tool"])
def test_a_custom_tool_is_called_with_a_text(serve, case):
    said, server, body = CASES[case]
    engine = FakeEngine(said)
    answer = whole(serve, engine, server, **body)
    (call,) = (one for one in answer.output if one.type == "custom_tool_call")
    assert (call.name, call.input) == ("patch", PATCHED)
    assert LARK["definition"] in prompt_of(engine).replace("\\", "")
    assert answer.tools[0].model_dump(exclude_none=True) == PATCH
    events = streamed(serve, said, server, **body)
    deltas = [one for one in events if one.type == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 1
    (done,) = (one for one in events if one.type == "response.custom_tool_call_input.done")
    assert (done.input, done.item_id) == (PATCHED, deltas[0].item_id)
    added = [one.item for one in events if one.type == "response.output_item.added"]
    assert [one.input for one in added if one.type == "custom_tool_call"] == [""]


def test_a_call_of_a_custom_tool_can_be_sent_back():
    (found, returned) = rendered(
        input=[
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": PATCHED},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        ]
    )
    (call,) = found["tool_calls"]
    assert call["function"] == {"name": "patch", "arguments": {"input": PATCHED}}
    assert (returned["role"], returned["content"]) == ("tool", "Done.")
    assert (call["id"], returned["tool_call_id"]) == ("c1", "c1")


def test_a_custom_tool_in_a_namespace_has_a_name_of_its_own(serve):
    said, group = call_of("mcp__sums__patch", PATCHED), GROUP | {"tools": [PATCH]}
    (call,) = whole(serve, said, HERMES, tools=[group]).output
    assert call.type == "custom_tool_call"
    assert (call.namespace, call.name) == ("mcp__sums", "patch")


def test_functions_in_a_namespace_have_names_of_their_own(serve):
    said, server, body = CASES["a call in a namespace"]
    engine = FakeEngine(said)
    (call,) = whole(serve, engine, server, **body).output
    assert (call.namespace, call.name, call.arguments) == ("mcp__sums", "add", '{"a": 1}')
    assert "mcp__sums__add" in prompt_of(engine)
    for event in streamed(serve, said, server, **body):
        if event.type.startswith("response.output_item"):
            assert (event.item.namespace, event.item.name) == ("mcp__sums", "add")
        assert event.type != "response.function_call_arguments.done" or event.name == "add"
    (found,) = rendered(input=[call.model_dump(exclude_none=True)])
    assert found["tool_calls"][0]["function"]["name"] == "mcp__sums__add"


def test_the_constraint_is_that_of_the_format(serve):
    engine = FakeEngine('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    whole(serve, engine, text=text)
    _, params = engine.seen[-1]
    assert json.loads(params.structured_outputs.json_schema) == schema
    whole(serve, engine, **FORMAT)
    assert engine.seen[-1][1].structured_outputs.json_object
    whole(serve, engine, text={"format": {"type": "text"}, "verbosity": "medium"})
    assert engine.seen[-1][1].structured_outputs is None
    (item,) = whole(serve, engine, tools=[ADD], **FORMAT).output
    assert (item.type, text_of(item)) == ("message", '{"a": 1}')
    assert engine.seen[-1][1].structured_outputs.free_after == "<tool_call>"
    (item,) = whole(serve, CALL, tools=[ADD], **FORMAT).output
    assert (item.type, item.arguments) == ("function_call", '{"a": 1}')
    mere_json = post(serve, "never", {"tool_call_parser": "llama3_json"}, tools=[ADD], **FORMAT)
    assert 'tool_choice "none"' in mere_json.json()["error"]["message"]
    forced = {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}
    (item,) = whole(serve, FakeEngine("{}"), **forced).output
    assert (item.type, item.name, item.arguments) == ("function_call", "add", "{}")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items"),
        ({"conversation": "c"}, "conversation", "send the earlier items"),
        ({"background": True}, "background", "leave it out"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"messages": []}, "messages", "use input"),
        ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
        ({"n": 2}, "n", "less than or equal to 1"),
        ({"response_format": {"type": "json_object"}}, "response_format", "use text.format"),
        ({"return_token_ids": True}, "return_token_ids", "/v1/chat/completions"),
        ({"include": ["usage"]}, "include", "message.output_text.logprobs"),
        ({"tools": [{"name": "f"}]}, "tools", "tools.0.type: Field required"),
        (
            {"tools": [GROUP | {"tools": [{"type": "function"}]}]},
            "tools",
            "tools.0.tools.0.name: Field required",
        ),
        (
            {"tools": [GROUP, ADD | {"name": "mcp__sums__add"}]},
            "tools",
            "two functions that the model would see as 'mcp__sums__add'",
        ),
        ({"tools": OTHERS, "tool_choice": "required"}, "tool_choice", "Send tools"),
        ({"tools": OTHERS, "tool_choice": OTHERS[0]}, "tool_choice", "tool_choice.type"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: Input should be"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"tool_choice": "required"}, "tool_choice", "Send tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice",
            "allows no function",
        ),
        ({"tool_choice": {"name": "f"}}, "tool_choice", "tool_choice.type: Field required"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "'schema'"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity is not supported"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "input.0.type"),
        ({"input": [{"content": "x"}]}, "input", "lacks 'role'"),
        (
            {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]},
            "input",
            "lacks 'input'",
        ),
        (
            {"tools": [PATCH | {"format": {"type": "grammar", "syntax": "ebnf"}}]},
            "tools",
            "tools.0.format.definition",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "lacks 'call_id'"),
        ({"input": [{"type": "function_call_output"}]}, "input", "lacks 'call_id'"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "content": "3"}]},
            "input",
            "input.0 lacks 'output'",
        ),
        ({"input": [{"role": "user", "text": "hi"}]}, "input", "input.0 lacks 'content'"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input",
            "nothing is stored. Send the item itself, as clients do with store: false",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "Only text is supported",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "'text'"),
        ({"input": []}, "input", "at least 1"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f"}] * 1025},
            "input",
            "has 1025 calls and at most 1024 are allowed",
        ),
        ({"top_logprobs": 5, "stream_options": {}}, "stream_options", "Set stream to true"),
        ({"unheard_of": 1}, "unheard_of", "unknown field"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(serve, body, param, words):
    error = refused(serve, **body)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"store": True, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        # Codex sends it.
        {"client_metadata": {"x-codex-installation-id": "i"}},
        {"background": False, "truncation": "disabled", "previous_response_id": None},
        # As OpenAI's Agents SDK and Vercel's AI SDK may send them.
        {"include": ["web_search_call.action.sources", "code_interpreter_call.outputs"]},
        {"reasoning": {"mode": "standard", "context": "auto"}, "previous_response": None},
        {"include": ["reasoning.encrypted_content"], "max_tool_calls": 3, "service_tier": "auto"},
        {"reasoning": {"effort": None, "summary": "auto"}, "n": 1, "top_k": 3, "seed": 1},
    ],
)
def test_fields_that_change_no_token_are_accepted(serve, body):
    assert whole(serve, TEXT, **body).output_text == TEXT


def test_an_error_ends_a_stream_with_a_failed_response(serve):
    """Codex passes over the event of the error."""
    first, *_, told, last = streamed(serve, FakeEngine(TEXT, failed=True))
    assert (told.type, told.code) == ("error", NumericalError.__name__)
    assert told.message
    assert (last.type, last.sequence_number) == ("response.failed", told.sequence_number + 1)
    error = {"code": "server_error", "message": told.message}
    failed = first.response.to_dict() | {"status": "failed", "error": error}
    assert last.response.to_dict() == failed


def write(steps: list[tuple]) -> list[str]:
    """The texts of the items of an answer in which these parts are found, step by step."""
    found = iter(parsed_of(step) for step in steps)
    writer = ItemWriter(lambda text, finished: next(found), "k", {}, with_logprobs=False)
    for _ in steps[1:]:
        list(writer.write("x" * 100, []))
    list(writer.finish("x" * 100, [], is_cut=False))
    return [f"{item.type}: {text_of(item)}" for item in writer.items]


def test_a_part_that_goes_on_after_another_is_an_item_of_its_own():
    call, longer = FoundCall("f", "{"), FoundCall("f", "{}")
    one, more = FoundText("reasoning", "one"), FoundText("reasoning", ", two")
    a, b, c = (FoundText("content", text) for text in "abc")
    assert write(
        [
            (one, a),
            (one, a, b, call),
            (one, a, b, longer, c),
            (one, a, b, longer, c, more, call),
            (one, a, b, longer, c, more, longer),
        ]
    ) == [
        "reasoning: one", "message: ab", "function_call: {}", "message: c",
        "reasoning: , two", "function_call: {}",
    ]  # fmt: skip


def test_an_answer_of_nothing_is_an_empty_message():
    writer = ItemWriter(parse_nothing, "k", {}, with_logprobs=True)
    events = list(writer.finish("", [], is_cut=True))
    (item,) = writer.items
    assert (item.status, text_of(item), item.content[0].logprobs) == ("incomplete", "", [])
    assert [event.type.removeprefix("response.") for event in events] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip

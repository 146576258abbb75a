from __future__ import annotations

import json

import pytest

from helpers.structured import compiler, ids
from sametoken.engine.user_inputs import plain_messages
from sametoken.errors import RequestError
from sametoken.serving.http import tool_media
from sametoken.serving.http.errors import ApiError, as_api_error
from sametoken.serving.http.json_calls import parse_hermes, parse_llama3_json, parse_required
from sametoken.serving.http.messages_api import conversation as messages_api
from sametoken.serving.http.messages_api.request import MessagesRequest
from sametoken.serving.http.params import structured_outputs
from sametoken.serving.http.parsed import parse_nothing
from sametoken.serving.http.responses_api import conversation as responses_api
from sametoken.serving.http.responses_api.request import ResponsesRequest
from sametoken.serving.http.schemas import ChatRequest
from sametoken.serving.http.tool_parsers import CallSyntax
from sametoken.serving.http.tools import template_messages, tool_use, with_allowed
from sametoken.types.structured_outputs import StructuredOutputs

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "default": None}},
}
NOW = {"type": "function", "function": {"name": "now"}}
USER = [{"role": "user", "content": "x"}]
JSON = {"type": "json_object"}


NAMED = {"type": "function", "function": {"name": "add"}}


HERMES = CallSyntax(parse_hermes, "<tool_call>")


def use(syntax=HERMES, **fields):
    request = ChatRequest(messages=USER, **fields)
    return tool_use(request, structured_outputs(request), syntax)


def test_without_tools_nothing_is_parsed():
    assert use().parser is parse_nothing
    assert use(response_format=JSON).structured == StructuredOutputs(json_object=True)


def test_a_model_that_must_not_call_sees_the_tools():
    found = use(tools=[ADD], tool_choice="none", syntax=None)
    assert (found.tools, found.parser, found.structured) == ([ADD], parse_nothing, None)


def test_without_a_call_the_response_format_applies():
    found = use(tools=[ADD], tool_choice="none", response_format=JSON)
    assert found.structured == StructuredOutputs(json_object=True)
    assert found.parser is parse_nothing


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_a_forced_call_is_no_text_and_has_no_response_format(choice, kind):
    forced = {"tools": [ADD, NOW], "tool_choice": choice}
    found = use(**forced, response_format={"type": kind})
    assert found.structured == use(**forced).structured


def test_a_regular_expression_of_a_custom_tool_binds_a_forced_call():
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    tool = {"type": "custom", "custom": {"name": "say", "format": regex}}
    choice = {"type": "custom", "custom": {"name": "say"}}
    form = json.loads(use(tools=[tool], tool_choice=choice).structured.json_schema)
    assert form["properties"] == {"input": {"type": "string", "pattern": "a+"}}


def test_there_may_be_many_tools():
    """As an agent with several MCP servers has them: a body's size is what bounds them."""
    names = [f"f{i}" for i in range(300)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    assert use(tools=tools).functions == names
    flat = [{"type": "function", "name": name} for name in names]
    grouped = {"type": "namespace", "name": "m", "tools": flat}
    for given in (flat, [grouped]):
        request = ResponsesRequest.model_validate({"input": "x", "tools": given})
        assert len(responses_api.chat_request(request).tools) == 300
    bare = [{"name": name, "input_schema": {}} for name in names]
    request = MessagesRequest.model_validate({"messages": USER, "max_tokens": 1, "tools": bare})
    assert len(messages_api.chat_request(request).tools) == 300


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_may_be_among_some_of_the_tools(mode):
    custom = {"type": "custom", "custom": {"name": "say"}}
    allowed = [NAMED, {"type": "custom", "custom": {"name": "say"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    fields = {"messages": USER, "tools": [NOW, ADD, custom]}
    request = with_allowed(ChatRequest(**fields, tool_choice=choice))
    assert [tool.function.name for tool in request.tools] == ["add", "say"]
    assert (request.tool_choice, request.may_call) == (mode, mode == "auto")
    flat = [{"type": "function", "name": "add"}, {"type": "custom", "name": "say"}]
    body = {
        "input": "x",
        "tools": [ADD["function"] | {"type": "function"}, {"type": "custom", "name": "say"}],
        "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": [*flat, {"type": "mcp"}]},
    }
    found = responses_api.chat_request(ResponsesRequest.model_validate(body))
    assert [one.function.name for one in found.tool_choice.allowed_tools.tools] == ["add", "say"]
    assert found.forces_call == (mode == "required")
    del fields["tools"][0], fields["tools"][0]
    with pytest.raises(ApiError, match="tool_choice names 'add', which is not among the tools"):
        with_allowed(ChatRequest(**fields, tool_choice=choice))


def test_auto_uses_the_model_s_own_syntax():
    found = use(tools=[ADD, NOW])
    assert found.tools == [ADD, NOW]
    assert found.parser is parse_hermes
    assert found.structured is None


MERE_JSON = CallSyntax(parse_llama3_json)


@pytest.mark.parametrize("choice", [None, "auto"])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"response_format": JSON}, {"json_object": True}), ({"guided_regex": "a+"}, {"regex": "a+"})],
)
def test_a_model_may_call_instead_of_an_answer_of_the_form(choice, fields, kind):
    asked = {"tools": [ADD], "tool_choice": choice} | fields
    assert use(**asked).structured == StructuredOutputs(**kind, free_after="<tool_call>")
    outside = CallSyntax(parse_hermes, "<tool_call>", is_constrained=False)
    assert use(outside, **asked).structured == StructuredOutputs(**kind)


def test_required_constrains_to_the_tools():
    found = use(tools=[ADD, NOW], tool_choice="required", syntax=None)
    schema = json.loads(found.structured.json_schema)
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert (schema["minItems"], names) == (1, ["add", "now"])
    assert found.parser is parse_required


#: As pydantic writes nested models, and classes that hold their own kind.
NESTED = {
    "$defs": {
        "Cat": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "of": {"$ref": "#"}, "enum": {"const": 1}},
            "required": ["kind"],
            "additionalProperties": False,
        },
        "Dog": {
            "type": "object",
            "properties": {"kind": {"const": "dog"}, "in": {"enum": [{"$ref": "#/x"}]}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    },
    "type": "object",
    "properties": {
        "pet": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
        "more": {"type": "array", "items": {"$ref": "#/$defs/Dog"}},
        "color": {"$ref": "#/components/color"},
    },
    # As OpenAPI has its schemas.
    "components": {"color": {"$ref": "#/components/word"}, "word": {"enum": ["red"]}},
    "required": ["pet"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ('{"pet": {"kind": "cat", "of": {"pet": {"kind": "dog", "in": {"$ref":"#/x"}}}}}', True),
        ('{"pet": {"kind": "cat", "enum": 1}, "more": [{"kind": "dog"}]}', True),
        ('{"pet": {"kind": "dog"}, "color": "red"}', True),
        ('{"pet": {"kind": "dog"}, "color": "blue"}', False),
        ('{"pet": {"kind": "cow"}}', False),
        ('{"pet": {"kind": "cat", "of": {}}}', False),
        ('{"pet": {"kind": "dog"}, "more": [{"kind": "cat"}]}', False),
    ],
)
def test_references_of_a_tool_lead_into_its_own_parameters(parameters, fits):
    other = {"$defs": {"Cat": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/Cat"}}}
    tools = [
        {"type": "function", "function": {"name": "other", "parameters": other}},
        {"type": "function", "function": {"name": "keep", "parameters": NESTED}},
    ]
    found = use(tools=tools, tool_choice="required", syntax=None)
    matcher = compiler().compile(found.structured).new_matcher()
    text = f'[{{"name": "keep", "parameters": {parameters}}}]'
    assert all(map(matcher.accept, ids(text))) == fits


def test_one_call_alone_may_be_forced():
    found = use(tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    assert json.loads(found.structured.json_schema)["maxItems"] == 1
    assert use(tools=[ADD], tool_choice=NAMED, parallel_tool_calls=False).structured is not None
    found = use(tools=[ADD], tool_choice="required", parallel_tool_calls=True)
    assert "maxItems" not in json.loads(found.structured.json_schema)


def test_a_named_tool_constrains_to_its_parameters():
    found = use(tools=[ADD, NOW], tool_choice=NAMED, syntax=None)
    assert json.loads(found.structured.json_schema) == ADD["function"]["parameters"]
    assert not found.reports_calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "syntax": MERE_JSON, "response_format": JSON}, "tool_choice"),
        ({"tools": [ADD], "syntax": MERE_JSON, "guided_regex": "a"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": NAMED, "guided_regex": "a"}, "tool_choice"),
        (
            {
                "tools": [ADD],
                "tool_choice": "required",
                "response_format": {"type": "text"},
                "guided_regex": "a",
            },
            "tool_choice",
        ),
        ({"tools": [ADD], "syntax": None}, "tools"),
        ({"tools": [ADD], "syntax": None, "response_format": JSON}, "tools"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields, param):
    with pytest.raises(ApiError) as caught:
        use(**fields)
    assert caught.value.param == param


def messages(*given) -> list:
    return plain_messages(template_messages(ChatRequest(messages=list(given)).messages))


def test_messages_become_what_templates_read():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    found = messages(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        # As in the Responses API, which vLLM's chats take too.
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
    )
    assert found[0] == {"role": "user", "content": "a\nb"}
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert (found[1]["content"], found[1]["reasoning_content"]) == ("", "hm")
    assert (found[1]["reasoning"], found[1]["thinking"]) == ("hm", "hm")
    assert found[2] == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert [one["content"] for one in found[3:]] == ["no", "c", "d"]


def test_calls_have_ids_of_the_model_s_form():
    def turn(*names: str) -> list:
        calls = [{"id": f"call_{name}", "function": {"name": name}} for name in names]
        outputs = [{"role": "tool", "content": "", "tool_call_id": call["id"]} for call in calls]
        return [{"role": "assistant", "tool_calls": calls}, *reversed(outputs)]

    def ids(parser: str) -> list[str]:
        # As with some clients, the second turn has an id of the first again.
        request = ChatRequest(messages=[*turn("f", "g"), *turn("f")])
        first, *outputs, second, last = template_messages(request.messages, parser)
        calls = first["tool_calls"] + second["tool_calls"]
        return [one["id"] for one in calls] + [one["tool_call_id"] for one in (*outputs, last)]

    names = ["functions.f:0", "functions.g:1", "functions.f:2"]
    assert ids("kimi_k2") == [*names, names[1], names[0], names[2]]
    numbers = ["000000000", "000000001", "000000002"]
    assert ids("mistral") == [*numbers, numbers[1], numbers[0], numbers[2]]
    given = ["call_f", "call_g", "call_f"]
    assert ids("hermes") == [*given, given[1], given[0], given[2]]


def test_reasoning_is_passed_on_where_a_template_can_take_it():
    call = {"function": {"name": "f"}}
    found = messages(
        {"role": "assistant", "content": "I call.", "reasoning": "hm", "tool_calls": [call]},
        {"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": "old"},
        {"role": "assistant", "content": "x", "reasoning": None, "thinking": None},
        {"role": "user", "content": "x", "reasoning": "hm"},
    )
    # gpt-oss's template refuses a call with both a text and thinking.
    assert (found[0]["reasoning_content"], found[0]["thinking"]) == ("hm", "")
    assert found[1]["reasoning_content"] == "hm"
    assert found[2] == {"role": "assistant", "content": "x"}
    assert found[3] == {"role": "user", "content": "x", "reasoning": "hm"}


def test_calls_that_were_cut_off_do_not_fill_the_log(caplog):
    """Agents send them again with every later request."""
    cut = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x'}}
    messages(*[{"role": "assistant", "tool_calls": [cut] * 50}] * 2)
    assert len(caplog.records) <= 1


def test_the_model_is_told_of_an_image_that_a_tool_returned(caplog, monkeypatch):
    """Agents send a result with every later request, which would fail too."""
    monkeypatch.setattr(tool_media._logger, "filters", [])
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    (found,) = messages({"role": "tool", "content": parts, "tool_call_id": "c"})
    told = "[a part of type image_url is left out: you can read only text]"
    assert found["content"] == f"a\n{told}"
    assert "a tool returned a part of type image_url" in caplog.text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": 1}]},
        {"role": "assistant", "content": [{"type": "refusal"}]},
    ],
)
def test_messages_that_no_template_could_read(message):
    with pytest.raises((ApiError, RequestError)) as caught:
        messages(message)
    refusal = as_api_error(caught.value)
    assert (refusal.status, refusal.param) == (400, "messages")

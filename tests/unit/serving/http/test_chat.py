from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from openai.types.chat import ChatCompletion

from helpers.chat_model import CHAT_TEMPLATE
from helpers.chat_model import SPECIAL as BYTES_SPECIAL
from helpers.events import events, merged_chat
from helpers.fake_engine import FakeEngine
from sametoken.serving.http.chat import _Answer, _ChoiceWriter
from sametoken.serving.http.harmony import MARKS
from sametoken.serving.http.parsed import parse_nothing
from sametoken.serving.http.reasoning_parsers import REASONING_FORMS, ComingAnswer, RenderedPrompt
from sametoken.serving.http.schemas import ChatRequest
from sametoken.serving.http.served import Served
from sametoken.serving.http.tool_parsers import FIRST_MARKS
from sametoken.serving.http.tools import ToolUse
from sametoken.types.outputs import CompletionOutput
from sametoken.types.structured_outputs import Reasoning, StructuredOutputs

USER = [{"role": "user", "content": "What is 1 + 2?"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
A_CALL, ITS_LIST = '{"a": 1}', '[{"name": "add", "parameters": {"a": 1}}]'
ADDED = [("add", A_CALL)]
TEXT = "héllo wörld 🙂 done"
NAMED = {"type": "function", "function": {"name": "add"}}
#: Of harmony's kind: special tokens, one of which ends texts, and a template.
SPECIAL = ("<|return|>", *(mark for mark in MARKS if mark != "<|return|>"), "<|other|>")
HARMONY = """\
<|start|>system<|message|>{{ reasoning_effort or "medium" }}<|end|>
{%- for message in messages %}<|start|>{{ message.role }}
{%- if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif %}<|message|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
THOUGHT = "<|channel|>analysis<|message|>Let me héar.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>1 + 2 is 3."
FINAL_BEGUN = "<|start|>assistant<|channel|>final<|message|>"
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


def harmony(said: str) -> FakeEngine:
    return FakeEngine(said, special=SPECIAL, template=HARMONY)


def client_of(serve, said: str | FakeEngine = "hello", **server) -> Callable:
    """Posts chats of one question, or of the messages that it is given."""
    client = serve(said, **server)
    return lambda **body: client.post("/v1/chat/completions", json={"messages": USER} | body)


def both(serve, said: str | FakeEngine, server=None, **body) -> tuple[dict, list[dict]]:
    """The answer to a request without and with a stream."""
    post = client_of(serve, said, **(server or {}))
    whole = post(**body)
    assert whole.status_code == 200, whole.text
    return whole.json(), events(post(**body, stream=True))


def one_choice(serve, said: str | FakeEngine, server=None, **body) -> tuple[dict, dict]:
    """The only choice of the answer without a stream, and what one with a stream adds up to."""
    whole, chunks = both(serve, said, server, **body)
    (choice,) = whole["choices"]
    return choice, merged_chat(chunks)[0]


def message_of(serve, said: str | FakeEngine, server=None, **body) -> dict:
    return one_choice(serve, said, server, **body)[0]["message"]


JSON = {"response_format": {"type": "json_object"}}
GOES_ON = {"add_generation_prompt": False, "continue_final_message": True}


def calls_of(message: dict) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]


def having_called(arguments: str) -> list[dict]:
    """Messages of a conversation in which ``add`` was called with these arguments."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


def call_deltas(chunks: list[dict]) -> list[dict]:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return [call for delta in deltas for call in delta.get("tool_calls") or []]


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
        (A_CALL, {"tools": [ADD], "tool_choice": NAMED}),
        (A_CALL, {"tools": [ADD], "tool_choice": NAMED} | JSON),
        (ITS_LIST, {"tools": [ADD], "tool_choice": "required"}),
        ("", {}),
        (f"<think>\n{TEXT}</think>\n\n{TEXT}", {"logprobs": True}),
        (f"<think>I add {CALL}.</think>I will add.\n{CALL}", {"tools": [ADD]}),
        (f"<think>{TEXT}</think>{TEXT}", {"include_reasoning": False, "return_token_ids": True}),
        (harmony(THOUGHT + FINAL), {"n": 2, "return_token_ids": True}),
        (harmony(f'{THOUGHT}{TO_ADD}{{"a": 1}}<|call|>'), {"tools": [ADD], "logprobs": True}),
        (harmony("{}"), JSON),
        (harmony(f"{THOUGHT}{FINAL}"), {"n": 2} | JSON),
    ],
)
def test_a_stream_adds_up_to_the_whole(serve, said, body):
    server = {"reasoning_parser": "qwen3"} if isinstance(said, str) else {}
    whole, chunks = both(serve, said, server, **body)
    found = merged_chat(chunks)
    assert len(found) == len(whole["choices"])
    for choice in whole["choices"]:
        streamed, message = found[choice["index"]], choice["message"]
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning"] == (message["reasoning"] or "")
        assert calls_of(streamed) == calls_of(message)
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["logprobs"] == (choice["logprobs"] or {}).get("content", [])
        assert streamed["token_ids"] == choice.get("token_ids", [])


def test_tool_calls(serve):
    whole, chunks = both(serve, f"Let me add.\n{CALL}", tools=[ADD])
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me add."
    assert calls_of(choice["message"]) == ADDED
    deltas = call_deltas(chunks)
    assert deltas[0]["function"]["name"] == "add"
    assert deltas[0]["type"] == "function"
    assert len(deltas) > 2, "arguments are not streamed"
    assert all("id" not in call and "name" not in call["function"] for call in deltas[1:])


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_marks_of_calls_may_be_special_tokens(serve, choice):
    engine = FakeEngine(CALL, special=(*BYTES_SPECIAL, "<tool_call>", "</tool_call>"))
    body = {"tools": [ADD], "tool_choice": choice, "max_tokens": 200}
    answered, streamed = one_choice(serve, engine, **body)
    message = answered["message"]
    assert len(calls_of(message)) == len(calls_of(streamed)) == (choice == "auto")
    assert "<" not in (message["content"] or "")


def test_without_parallel_calls_the_first_is_the_only_one(serve):
    two = {"tools": [ADD], "parallel_tool_calls": False}
    for said in (f"{CALL}\n{CALL}", harmony(f"{TO_ADD}{{}}<|call|><|start|>assistant{TO_ADD}{{}}")):
        whole, chunks = both(serve, said, **two)
        (choice,) = whole["choices"]
        assert (choice["finish_reason"], len(calls_of(choice["message"]))) == ("tool_calls", 1)
        assert {call["index"] for call in call_deltas(chunks)} == {0}


FORM = {"tools": [ADD]} | JSON
#: An answer of the form with what looks like a call of each syntax.
TURNS = """\
{% for m in messages %}<{% for c in m.tool_calls or [] %}{{ c.id + '=' + c.function.arguments }}
{%- endfor %}{{ m.tool_call_id }}>{% endfor %}"""
MISTRAL = '[TOOL_CALLS]add[ARGS]{"a": 1}'
SECTION = "<|tool_calls_section_begin|>"
KIMI = f'{SECTION}<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{{"a": 1}}'


@pytest.mark.parametrize(
    ("said", "template", "special", "shown"),
    [
        (MISTRAL, "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]"), "000000000"),
        (KIMI, SECTION, (), "functions.add:0"),
    ],
)
def test_a_family_s_own_calls_and_ids(serve, said, template, special, shown):
    engine = FakeEngine(said, special=(*BYTES_SPECIAL, *special), template=template + TURNS)
    call = {"id": "call_x", "function": {"name": "add", "arguments": '{"a":1}'}}
    output = {"role": "tool", "content": "", "tool_call_id": "call_x"}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, output]
    choice, streamed = one_choice(serve, engine, messages=messages, tools=[ADD])
    assert calls_of(choice["message"]) == calls_of(streamed) == ADDED
    assert engine.seen[0][0].text == f'{template}<><{shown}={{"a": 1}}><{shown}>'


NO_CALL = '{"a": "<tool_call><function=add></function></tool_call> <|channel|>"}'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("server", [{}, {"reasoning_parser": "deepseek_r1"}])
@pytest.mark.parametrize(
    ("syntax", "said", "content", "calls"),
    [
        ("hermes", NO_CALL, NO_CALL, []),
        ("hermes", CALL, None, ADDED),
        ("hermes", f"{CALL}\n{CALL} bye", " bye", [*ADDED, *ADDED]),
        ("hermes", "<tool_call>x", "<tool_call>x", []),
        ("qwen3_coder", NO_CALL, NO_CALL, []),
        ("qwen3_coder", XML, None, [("add", '{"a": "1"}')]),
        ("kimi_k2", KIMI, None, ADDED),
        ("olmo3", "<function_calls>add(a='1')</function_calls>", None, [("add", '{"a": "1"}')]),
    ],
)
def test_an_answer_is_of_its_format_or_calls(serve, server, syntax, said, content, calls):
    reasoned = "hm</think>" if server else ""
    engine = thinking(reasoned + said)
    server = server | {"tool_call_parser": syntax}
    for more in ({}, {"n": 2, "tool_choice": "auto"}, {"logprobs": True, "return_token_ids": True}):
        whole, chunks = both(serve, engine, server, **FORM, **more)
        structured = engine.seen[-1][1].structured_outputs
        assert (structured.json_object, structured.free_after) == (True, FIRST_MARKS[syntax])
        assert (structured.reasoning is not None) == bool(server.get("reasoning_parser"))
        found = merged_chat(chunks)
        for choice in whole["choices"]:
            message, streamed = choice["message"], found[choice["index"]]
            assert (message["content"], calls_of(message)) == (content, calls)
            assert message.get("reasoning") == (reasoned.removesuffix("</think>") or None)
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            assert streamed["content"] == (content or "")
            assert calls_of(streamed) == calls
            assert streamed["finish_reason"] == choice["finish_reason"]


def test_one_call_or_an_answer_up_to_a_stop_string(serve):
    one = FORM | {"parallel_tool_calls": False}
    choice, streamed = one_choice(serve, f"{CALL}\n{CALL}", **one)
    assert calls_of(choice["message"]) == calls_of(streamed) == ADDED
    assert calls_of(message_of(serve, CALL, **one, stop=["</tool_call>"])) == ADDED
    said = '{"a": "<tool_'
    choice, streamed = one_choice(serve, said, **FORM, stop=["call"], max_tokens=200)
    assert choice["message"]["content"] == streamed["content"] == said


def test_qwen_may_call_within_its_reasoning_instead_of_an_answer_of_the_format(serve):
    server = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "qwen3_coder"}
    choice, streamed = one_choice(serve, thinking(f"hm {XML}"), server, **FORM)
    assert calls_of(choice["message"]) == [("add", '{"a": "1"}')]
    assert streamed["reasoning"] == choice["message"]["reasoning"]


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>{{}}", "{}", []),
        (f'{THOUGHT}{TO_ADD}{{"a": 1}}<|call|>', None, ADDED),
        ("{}", "{}", []),
    ],
)
def test_harmony_s_calls_are_outside_of_the_format(serve, said, content, calls):
    engine = harmony(said)
    choice, streamed = one_choice(serve, engine, **FORM)
    structured = engine.seen[-1][1].structured_outputs
    assert structured.free_after is None
    assert structured.reasoning is not None
    assert (choice["message"]["content"], calls_of(choice["message"])) == (content, calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert (streamed["content"], calls_of(streamed)) == (content or "", calls)


def test_an_answer_continued_in_harmony_s_final_message_is_of_the_format(serve):
    template = HARMONY.replace("<|message|>{{ message.content }}<|end|>", "{{ message.content }}")
    engine = FakeEngine('"a": 1}', special=SPECIAL, template=template)
    messages = [*USER, {"role": "assistant", "content": "<|channel|>final<|message|>{"}]
    choice, streamed = one_choice(serve, engine, messages=messages, **FORM, **GOES_ON)
    assert choice["message"]["content"] == streamed["content"] == '"a": 1}'


def test_where_no_grammar_can_tell_calls_from_answers_both_are_refused(serve):
    special = (*BYTES_SPECIAL, "<tool_call>", "</tool_call>")
    at_once = {"structured_outputs_config": '{"enable_in_reasoning": true}'}
    for engine, server in (
        (FakeEngine(), {"tool_call_parser": "llama3_json"}),
        (FakeEngine(special=special), {}),
        (FakeEngine(special=(*BYTES_SPECIAL, "[TOOL_CALLS]")), {"tool_call_parser": "mistral"}),
        (FakeEngine(special=special), {"tool_call_parser": "qwen3_coder"}),
        (harmony(FINAL), at_once),
    ):
        answer = client_of(serve, engine, **server)(**FORM)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tool_choice")
        assert 'tool_choice "none"' in error["message"]


def test_calls_of_answers_with_one_id_have_ids_of_their_own(serve):
    said, more = '{"a": 2}', {"tools": [ADD], "tool_choice": NAMED, "request_id": "mine"}
    answers = [both(serve, said, **more) for _ in range(2)]
    assert {one["id"] for whole, chunks in answers for one in (whole, *chunks)} == {"chatcmpl-mine"}
    calls = [whole["choices"][0]["message"]["tool_calls"][0]["id"] for whole, _ in answers]
    assert calls[0] != calls[1]


def test_forced_calls(serve):
    for said, forced, reason in ((ITS_LIST, "required", "tool_calls"), (A_CALL, NAMED, "stop")):
        choice, _ = one_choice(serve, said, tools=[ADD], tool_choice=forced)
        assert (choice["finish_reason"], calls_of(choice["message"])) == (reason, ADDED)


WEATHER = {"type": "custom", "custom": {"name": "weather", "description": "Tells it."}}
ASKED = 'of "Zürich"\n\\d 🙂'


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (f'<tool_call>{{"name": "weather", "arguments": {json.dumps({"input": ASKED})}}}', {}),
        (
            json.dumps([{"name": "weather", "parameters": {"input": ASKED}}]),
            {"tool_choice": "required"},
        ),
        (
            json.dumps({"input": ASKED}),
            {"tool_choice": {"type": "custom", "custom": {"name": "weather"}}},
        ),
    ],
)
def test_a_custom_tool_takes_a_text(serve, said, body):
    whole, chunks = both(serve, said, tools=[ADD, WEATHER], **body)
    ChatCompletion.model_validate(whole)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "weather", "input": ASKED})
    deltas = call_deltas(chunks)
    assert (deltas[0]["type"], deltas[0]["custom"]["name"]) == ("custom", "weather")
    assert "".join(one["custom"]["input"] for one in deltas) == ASKED
    assert len(deltas) > 1
    assert not any("function" in one for one in (call, *deltas))


def test_the_model_sees_the_tools_that_it_may_call(serve):
    engine = FakeEngine(CALL)
    allowed = {"mode": "auto", "tools": [NAMED]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert calls_of(message_of(serve, engine, tools=[WEATHER, ADD], tool_choice=choice)) == ADDED
    assert json.dumps(ADD) in engine.seen[0][0].text
    assert "weather" not in engine.seen[0][0].text


def test_the_template_sees_a_custom_tool_as_a_function_of_one_text(serve):
    engine = FakeEngine()
    call = {"id": "c1", "type": "custom", "custom": {"name": "weather", "input": ASKED}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert client_of(serve, engine)(messages=messages, tools=[WEATHER]).status_code == 200
    ((prompt, _),) = engine.seen
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {**WEATHER["custom"], "parameters": parameters}
    assert json.dumps({"type": "function", "function": function}) in prompt.text
    shown = json.dumps({"name": "weather", "arguments": {"input": ASKED}}, ensure_ascii=False)
    assert shown in prompt.text


def test_the_template_sees_tools_and_earlier_calls(serve):
    engine = FakeEngine()
    messages = [*having_called(A_CALL), {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    body = {"messages": messages, "tools": [ADD], "max_completion_tokens": 4}
    assert client_of(serve, engine)(**body).status_code == 200
    ((prompt, params),) = engine.seen
    assert json.dumps(ADD) in prompt.text
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in prompt.text
    assert "<|im_start|>tool\n3<|im_end|>" in prompt.text
    assert prompt.text.endswith("<|im_start|>assistant\n")
    assert params.max_tokens == 4


@pytest.mark.parametrize(
    ("number", "status"),
    [("1e400", 400), ("9" * 200 + "e400", 400), ("9" * 300 + "e9", 400), ("1e308", 200)],
)
def test_a_number_beyond_a_float_in_an_earlier_call_is_refused(serve, number, status):
    """Python reads it as an infinity, which the template would write for it."""
    messages = having_called(f'{{"a": {number}}}')
    answer = client_of(serve)(messages=messages, tools=[ADD])
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert error["param"] == "messages"
        assert "call" in error["message"]
        assert ("finite" in error["message"]) != ("digits" in error["message"])


def test_what_is_no_json_in_an_earlier_call_is_no_infinity(serve):
    """Words outside of strings, as broken quotes leave them, are not read as numbers."""
    messages, engine = having_called('{"a": "5" wide IN}'), FakeEngine()
    assert client_of(serve, engine)(messages=messages, tools=[ADD]).status_code == 200
    ((prompt, _),) = engine.seen
    assert '<tool_call>{"name": "add", "arguments": {}}</tool_call>' in prompt.text


def test_the_end_of_a_conversation_is_kept(serve):
    post = client_of(serve)
    ids = post(return_token_ids=True).json()["prompt_token_ids"]
    kept = post(return_token_ids=True, truncate_prompt_tokens=20).json()
    assert kept["prompt_token_ids"] == ids[-20:]
    long = [{"role": "user", "content": "x" * 600}]
    answer = post(messages=long, truncate_prompt_tokens=-1, max_tokens=12).json()
    assert answer["usage"]["prompt_tokens"] == 500


def test_the_first_chunk_names_the_role_and_the_last_the_reason(serve):
    _, chunks = both(serve, "hi", stream_options=None)
    first, *_, last = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_usage_and_statistics_when_asked_for(serve):
    body = {"include_speculation_stats": True, "return_token_ids": True, "prompt_logprobs": 1}
    post = client_of(serve)
    whole = post(**body).json()
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["speculation"]["num_accepted_tokens"] == 4
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    stream = post(**body, stream=True, stream_options={"include_usage": True})
    first, *_, last = events(stream)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert len(first["prompt_logprobs"]) == len(first["prompt_token_ids"])
    assert (last["usage"], last["speculation"]) == (whole["usage"], whole["speculation"])


def test_usage_throughout_a_stream(serve):
    """As vLLM's clients ask for it; alone it asks for nothing."""
    post = partial(client_of(serve), stream=True, n=2)
    both_options = {"include_usage": True, "continuous_usage_stats": True}
    begin, *middle, last = events(post(stream_options=both_options))
    assert [one["usage"]["completion_tokens"] for one in (begin, last)] == [0, 2 * 6]
    assert last["choices"] == []
    for index in range(2):
        own = [one for one in middle if one["choices"][0]["index"] == index]
        counts = [one["usage"]["completion_tokens"] for one in own]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1] == 6
    alone = {"include_usage": None, "continuous_usage_stats": True}
    assert not any("usage" in chunk for chunk in events(post(stream_options=alone)))


@pytest.mark.parametrize(
    "body",
    [
        {"n": None},
        {"modalities": ["text"], "verbosity": "medium"},
        {"top_logprobs": 0},
        {"use_beam_search": False, "length_penalty": 1.0},
        {"priority": 0, "echo": False, "add_special_tokens": False},
        {"tools": [], "tool_choice": "auto"},
        {"seed": -1},
        {"stream_options": None},
        {"thinking_token_budget": -1, "truncation_side": "left", "return_mm_kwargs": True},
        {"routed_experts_prompt_start": 0, "return_prompt_text": False, "vllm_xargs": None},
        # What concerns images, or changes no token.
        {"mm_processor_kwargs": {"max_pixels": 9}, "session_id": "s", "stream_interval": 8},
    ],
)
def test_what_asks_for_nothing_is_served(serve, body):
    assert len(client_of(serve)(**body).json()["choices"]) == 1


OWN_TEMPLATE = {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}
NOWHERE = {"type": "object", "properties": {"a": {"$ref": "#/x"}}}
UNUSABLE = {"type": "function", "function": {"name": "f", "parameters": NOWHERE}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"functions": []}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"temperature": -1.0}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
        (OWN_TEMPLATE, "chat_template_kwargs"),
        ({"chat_template_kwargs": OWN_TEMPLATE}, "chat_template_kwargs"),
        ({"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"logprobs": 3}, "logprobs"),
        ({"priority": 1}, "priority"),
        ({"echo": True}, "echo"),
        ({"stop_token_ids": [2**30]}, "stop_token_ids"),
        ({"response_format": {"type": "regex", "regex": "((("}}, "response_format"),
        ({"tools": [UNUSABLE], "tool_choice": "required"}, "tools"),
        ({"tools": [UNUSABLE], "tool_choice": "required"} | JSON, "tools"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(serve, body, param):
    answer = client_of(serve)(**body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_log_probabilities_above_the_server_s_limit_are_named_as_chats_ask_for_them(serve):
    answer = client_of(serve, max_logprobs=2)(logprobs=True, top_logprobs=3)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "top_logprobs")
    assert "above the 2 of this server. Use 0 to 2" in error["message"]


def test_an_unknown_syntax_is_refused_before_anything_runs(serve):
    engine = FakeEngine()
    engine.tokenizer.hf.chat_template = "{{ messages[0].content }}"
    answer = client_of(serve, engine)(tools=[ADD])
    assert "--tool-call-parser" in answer.json()["error"]["message"]
    assert client_of(serve, engine, tool_call_parser="llama3_json")(tools=[ADD]).is_success
    assert not client_of(serve, tool_call_parser="none")(tools=[ADD]).is_success
    assert len(engine.seen) == 1


def test_reasoning_has_a_field_of_its_own(serve):
    said, parsed = "<think>hm</think>yes", {"reasoning_parser": "qwen3"}
    whole, chunks = both(serve, said, parsed)
    message = ChatCompletion.model_validate(whole).choices[0].message
    assert (message.reasoning, message.content) == ("hm", "yes")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(len(delta) == 1 for delta in deltas[1:-1])
    assert message_of(serve, said, parsed, include_reasoning=False)["reasoning"] is None
    assert message_of(serve, "yes", parsed)["reasoning"] is None
    cut = message_of(serve, "<think>hm", parsed)
    assert (cut["reasoning"], cut["content"]) == ("hm", None)
    assert message_of(serve, said) == {"role": "assistant", "content": said, "refusal": None}


def test_long_reasoning_is_streamed_as_it_comes():
    request = ChatRequest(messages=USER)
    answer = ComingAnswer(RenderedPrompt(""), parse_nothing, shows_marks=False)
    parser = REASONING_FORMS["deepseek_r1"].parser(answer)
    use = ToolUse(None, parser, None)
    served = Served(engine=None, config=None, times=None, defaults=None)
    writer = _ChoiceWriter(_Answer(request, use, "chatcmpl-1", "m", served), 0)
    for length in (6400, 6401):
        (piece,) = writer.write(CompletionOutput(0, "x" * length, ()))
    assert piece.delta.reasoning == "x"


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_a_template_may_have_begun_the_reasoning(serve, variable):
    engine = FakeEngine("hm</think>yes")
    engine.tokenizer.hf.chat_template += f"{{% if {variable} %}}<think>\n{{% endif %}}"
    body = {"chat_template_kwargs": {variable: True}}
    message = message_of(serve, engine, {"reasoning_parser": "qwen3"}, **body)
    assert (message["reasoning"], message["content"]) == ("hm", "yes")
    by_effort = message_of(serve, engine, {"reasoning_parser": "qwen3"}, reasoning_effort="low")
    assert by_effort == message
    message = message_of(serve, engine, {"reasoning_parser": "qwen3"}, reasoning_effort="none")
    assert (message["reasoning"], message["content"]) == (None, "hm</think>yes")


THOUGHT_OUT = "<think>hm</think>It "
#: A field for earlier reasoning, as Qwen3's template has one.
WITH_FIELD = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning %}<think>{{ message.reasoning }}</think>\n\n{% endif %}"
    "{{ message.content }}",
)


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(
    ("continued", "said", "reasoning", "content"),
    [
        ({"content": THOUGHT_OUT}, "is {}", None, "is {}"),
        ({"content": [{"type": "text", "text": THOUGHT_OUT}]}, "is {}", None, "is {}"),
        ({"content": THOUGHT_OUT.strip()}, "is {}", None, "is {}"),
        ({"content": "It", "reasoning": "hm"}, " is {}", None, " is {}"),
        ({"content": "<think>h"}, "m</think>{}", "m", "{}"),
        ({"content": "<think>"}, "hm</think>{}", "hm", "{}"),
    ],
)
def test_an_answer_that_continues_a_message_goes_on_where_it_stands(
    serve, name, continued, said, reasoning, content
):
    engine = thinking(said, WITH_FIELD)
    messages = [
        *USER,
        {"role": "assistant", "content": "<think>earlier"},
        {"role": "user", "content": "</think> is a mark"},
        {"role": "assistant", **continued},
    ]
    body, server = GOES_ON | {"messages": messages}, {"reasoning_parser": name}
    choice, streamed = one_choice(serve, engine, server, **body)
    for found in (choice["message"], streamed):
        assert (found["reasoning"] or None, found["content"]) == (reasoning, content)
    both(serve, engine, server, **body, **JSON)
    waits = engine.seen[-1][1].structured_outputs.reasoning
    (end,) = engine.tokenizer.encode("</think>", add_special_tokens=False)
    assert waits == (None if reasoning is None else Reasoning((end,)))


def test_harmony_is_chosen_by_the_template(serve):
    message = message_of(serve, harmony(THOUGHT + FINAL))
    assert (message["reasoning"], message["content"]) == ("Let me héar.", "1 + 2 is 3.")
    raw = message_of(serve, harmony(THOUGHT + FINAL), {"reasoning_parser": "none"})
    assert raw["content"] == "analysisLet me héar.assistantfinal1 + 2 is 3."
    assert message_of(serve, harmony(THOUGHT + FINAL), {"tool_call_parser": "none"}) == raw


@pytest.mark.parametrize("channel", ["commentary", "analysis"])
def test_harmony_s_calls_may_lack_the_prefix_of_functions(serve, channel):
    said = f"<|channel|>{channel} to=add <|constrain|>json<|message|>{{}}<|call|>"
    choice, streamed = one_choice(serve, harmony(said), tools=[ADD])
    assert calls_of(choice["message"]) == calls_of(streamed) == [("add", "{}")]
    other = message_of(serve, harmony(said.replace("to=add", "to=python")), tools=[ADD])
    assert (calls_of(other), other["reasoning"]) == ([], "{}")


def test_harmony_s_calls_end_the_answer(serve):
    said = f'{THOUGHT}{TO_ADD}{{"a": 1}}<|call|><|start|>assistant{FINAL}'
    choice, _ = one_choice(serve, harmony(said), tools=[ADD])
    message = choice["message"]
    assert (choice["finish_reason"], calls_of(message)) == ("tool_calls", ADDED)
    assert (message["reasoning"], message["content"]) == ("Let me héar.", None)
    engine = harmony(said)
    ends = []
    for ignore_eos in (False, True):
        both(serve, engine, ignore_eos=ignore_eos, stop_token_ids=[5], max_tokens=4)
        ends.append(engine.seen[-1][1].stop_token_ids)
    assert ends == [(5, engine.tokenizer.backend.token_to_id("<|call|>")), (5,)]


def test_marks_without_a_meaning_are_skipped_like_special_tokens(serve):
    said = f"{FINAL}<|constrain|>."
    assert message_of(serve, harmony(said))["content"] == "1 + 2 is 3.."
    shown = message_of(serve, harmony(said), skip_special_tokens=False)["content"]
    assert shown == "1 + 2 is 3.<|constrain|>."


def thinking(said: str, template: str = CHAT_TEMPLATE) -> FakeEngine:
    """With a token for each mark."""
    return FakeEngine(said, special=(*BYTES_SPECIAL, "<think>", "</think>"), template=template)


def constrained(serve, engine, server, **body) -> tuple[dict, StructuredOutputs]:
    """The message of a constrained answer, and the constraint that the engine has got."""
    message = message_of(serve, engine, server, **body)
    return message, engine.seen[-1][1].structured_outputs


OPENS = CHAT_TEMPLATE + "{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"


def test_a_constrained_answer_reasons_first(serve):
    engine = thinking("hm</think>{}")
    start, end = map(engine.tokenizer.backend.token_to_id, ("<think>", "</think>"))
    for name, begins, said in (
        ("deepseek_r1", (), "hm</think>{}"),
        ("qwen3", (start,), "<think>hm</think>{}"),
    ):
        engine.say = lambda prompt, index, said=said: said
        message, structured = constrained(serve, engine, {"reasoning_parser": name}, **JSON)
        assert (message["reasoning"], message["content"]) == ("hm", "{}")
        assert structured.reasoning == Reasoning((end,), begins=begins)
    message, structured = constrained(
        serve,
        thinking("hm</think>{}", OPENS),
        {"reasoning_parser": "qwen3"},
        **JSON,
        reasoning_effort="low",
    )
    assert (message["reasoning"], message["content"]) == ("hm", "{}")
    assert structured.reasoning == Reasoning((end,))


def test_harmony_s_constraint_holds_in_the_final_channel(serve):
    engine = harmony(f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>{{}}")
    message, structured = constrained(serve, engine, {}, **JSON)
    assert (message["reasoning"], message["content"]) == ("Let me héar.", "{}")
    encode = partial(engine.tokenizer.encode, add_special_tokens=False)
    (end,) = encode("<|message|>")
    begins = (*encode("<|start|>"), *encode("<|channel|>"))
    assert structured.reasoning == Reasoning(encode("<|channel|>final"), end, begins)


@pytest.mark.parametrize(
    ("choice", "call", "reason"), [(NAMED, A_CALL, "stop"), ("required", ITS_LIST, "tool_calls")]
)
def test_a_forced_call_reasons_first(serve, choice, call, reason):
    for engine, server in (
        (thinking(f"<think>hm</think>{call}"), {"reasoning_parser": "qwen3"}),
        (harmony(f"<|channel|>analysis<|message|>hm<|end|>{FINAL_BEGUN}{call}"), {}),
    ):
        one, streamed = one_choice(serve, engine, server, tools=[ADD], tool_choice=choice)
        assert engine.seen[-1][1].structured_outputs.reasoning is not None
        assert one["message"]["reasoning"] == streamed["reasoning"] == "hm"
        assert calls_of(one["message"]) == calls_of(streamed) == ADDED
        assert one["finish_reason"] == reason


@pytest.mark.parametrize(
    "stray",
    [
        "<|channel|>analysis<|message|>hm<|end|>well",
        "<|channel|>other<|message|>hm<|end|>well",
        "<|start|>assistant<|message|>hm<|end|>well",
        "<|channel|>hm!<|end|>well",
    ],
)
def test_what_is_not_in_harmony_s_final_channel_is_no_part_of_a_forced_call(serve, stray):
    engine = harmony(f"{stray}{FINAL_BEGUN}{A_CALL}")
    choice, streamed = one_choice(serve, engine, tools=[ADD], tool_choice=NAMED)
    for found in (choice["message"], streamed):
        assert re.fullmatch(r"hm!?\nwell", found["reasoning"])
    assert calls_of(choice["message"]) == ADDED
    tool = {"type": "function", **ADD["function"]}
    choice = {"type": "function", "name": "add"}
    body = {"input": "x", "tools": [tool], "tool_choice": choice, "stream": True}
    last = serve(engine).post("/v1/responses", json=body).text.rpartition("data: ")[2]
    output = json.loads(last)["response"]["output"]
    assert [(one["type"], one.get("arguments")) for one in output] == [
        ("reasoning", None),
        ("function_call", A_CALL),
    ]


def test_a_constraint_holds_at_once_without_reasoning(serve):
    """Its server says so, the prompt has ended the reasoning, or a mark is not one token."""
    at_once = {"structured_outputs_config": '{"enable_in_reasoning": true}'}
    for engine, server, body in (
        (thinking("{}"), {"reasoning_parser": "deepseek_r1", **at_once}, {}),
        (thinking("{}"), {"reasoning_parser": "qwen3", **at_once}, {}),
        (harmony("{}"), at_once, {}),
        (thinking("{}", OPENS), {"reasoning_parser": "qwen3"}, {"reasoning_effort": "none"}),
        (thinking("{}", OPENS), {"reasoning_parser": "deepseek_r1"}, {"reasoning_effort": "none"}),
        (FakeEngine("{}"), {"reasoning_parser": "deepseek_r1"}, {}),
        (thinking("{}"), {}, {}),
    ):
        message, structured = constrained(serve, engine, server, **JSON, **body)
        assert (message.get("reasoning"), message["content"]) == (None, "{}")
        assert structured == StructuredOutputs(json_object=True)
        assert engine.seen[0][1].skip_special_tokens


BUDGET = {"thinking_token_budget": 9}
CONTINUES = GOES_ON | {"messages": [*USER, {"role": "assistant", "content": "<think>hm"}]}


@pytest.mark.parametrize(
    ("parser", "template", "body", "begins", "budget"),
    [
        ("deepseek_r1", CHAT_TEMPLATE, {}, {"begins": True, "has_begun": True}, 9),
        ("qwen3", CHAT_TEMPLATE, {}, {"begins": True}, 9),
        # What the prompt holds of the reasoning counts.
        ("qwen3", OPENS, {"reasoning_effort": "low"}, {}, 8),
        ("deepseek_r1", OPENS, {"reasoning_effort": "low"}, {}, 8),
        ("qwen3", CHAT_TEMPLATE, CONTINUES, {}, 7),
        ("qwen3", CHAT_TEMPLATE, CONTINUES | {"thinking_token_budget": 1}, {}, 0),
    ],
)
def test_a_budget_bounds_the_reasoning(serve, parser, template, body, begins, budget):
    engine = thinking("hm</think>{}", template)
    start, end = map(engine.tokenizer.backend.token_to_id, ("<think>", "</think>"))
    begins = begins | {"begins": (start,)} if begins else {}
    expected = Reasoning((end,), budget=budget, **begins)
    for more in ({}, JSON, {"tools": [ADD], "tool_choice": NAMED}):
        message_of(serve, engine, {"reasoning_parser": parser}, **BUDGET | body | more)
        params = engine.seen[-1][1]
        assert params.thinking_token_budget is None
        assert params.structured_outputs.reasoning == expected
        assert params.structured_outputs.has_any_text is (more == {})


def test_a_call_ends_reasoning_that_has_a_budget_and_no_constraint(serve):
    special = (*BYTES_SPECIAL, "<think>", "</think>", "<tool_call>")
    engine = FakeEngine(f"<think>hm{CALL}", special=special)
    token_id = engine.tokenizer.backend.token_to_id
    for more, ends in (({}, (token_id("<tool_call>"),)), ({"tool_choice": NAMED}, ())):
        both(serve, engine, {"reasoning_parser": "qwen3"}, tools=[ADD], **BUDGET, **more)
        structured = engine.seen[-1][1].structured_outputs
        assert structured.reasoning.also_ends == ends


def test_a_budget_binds_nothing_where_nothing_is_reasoned(serve):
    """The engine sees the same, with a budget of reasoning that may still begin by a mark."""
    at_once = {"structured_outputs_config": '{"enable_in_reasoning": true}'}
    for engine, server, body in (
        (thinking("hm", OPENS), {"reasoning_parser": "qwen3"}, {"reasoning_effort": "none"}),
        (thinking("{}"), {"reasoning_parser": "qwen3", **at_once}, JSON),
        (thinking("hm"), {}, {}),
    ):
        plain = message_of(serve, engine, server, **body)
        assert message_of(serve, engine, server, **BUDGET, **body) == plain
        before, after = (engine.seen[place][1] for place in (0, -1))
        assert after == replace(before, thinking_token_budget=9)


@pytest.mark.parametrize("more", [{}, JSON])
def test_a_budget_without_a_known_end_of_reasoning_is_refused(serve, more):
    for engine, server in ((harmony(FINAL), {}), (FakeEngine("x"), {"reasoning_parser": "qwen3"})):
        if more and server:
            continue  # Its constraint holds from the first token on.
        answer = client_of(serve, engine, **server)(**BUDGET, **more)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "thinking_token_budget")
        assert "</think>" in error["message"]
        assert "max_tokens" in error["message"]
        assert engine.seen == []


def test_the_template_sees_earlier_reasoning_and_the_effort(serve):
    engine = harmony(FINAL)
    for name in ("reasoning", "reasoning_content", "thinking"):
        earlier = {"role": "assistant", "content": "3", "reasoning": None, name: "hm"}
        messages = [*USER, earlier, *USER]
        answer = client_of(serve, engine)(messages=messages, reasoning_effort="high")
        assert answer.status_code == 200
    first, *others = [prompt.text for prompt, _ in engine.seen]
    assert first.startswith("<|start|>system<|message|>high<|end|>")
    assert "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|message|>3<|end|>" in first
    assert set(others) == {first}

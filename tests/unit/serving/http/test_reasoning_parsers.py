from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.parsing import assert_adds_up
from sametoken.serving.http.harmony import MARKS
from sametoken.serving.http.parsed import FoundCall, Parsed, parse_nothing
from sametoken.serving.http.reasoning_parsers import PARSER_MARKS, REASONING_PARSERS
from sametoken.serving.http.tool_parsers import parse_hermes, qwen3_coder_parser

PLAIN, OPENED, ENDED = "<|im_start|>assistant\n", "x<think>\n", "x<think>\n\n</think>\n\n"
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
XML = "<tool_call>\n<function=f>\n</function>\n</tool_call>"


def parser_of(name, prompt=PLAIN, content=parse_nothing):
    return REASONING_PARSERS[name](prompt, content, False)


CASES = [
    ("qwen3", PLAIN, "<think>\nhm\n</think>\n\nyes", Parsed("\n\nyes", (), "\nhm\n")),
    ("qwen3", PLAIN, "\n<think>hm</think>yes", Parsed("yes", (), "hm")),
    ("qwen3", PLAIN, "<think>cut off", Parsed("", (), "cut off")),
    ("qwen3", PLAIN, "<think>cut off</thi", Parsed("", (), "cut off</thi")),
    ("qwen3", PLAIN, " yes </think>", Parsed(" yes </think>")),
    ("qwen3", PLAIN, "<thinking> yes", Parsed("<thinking> yes")),
    ("qwen3", PLAIN, "<think", Parsed("<think")),
    ("qwen3", PLAIN, "a <think>b</think>", Parsed("a <think>b</think>")),
    ("qwen3", PLAIN, "<think>a<think>b</think>c</think>", Parsed("c</think>", (), "a<think>b")),
    ("qwen3", OPENED, "hm</think>yes", Parsed("yes", (), "hm")),
    ("qwen3", OPENED, " hm", Parsed("", (), " hm")),
    ("qwen3", OPENED, "hm <tool_call> \n<func", Parsed("", (), "hm <tool_call> \n<func")),
    ("qwen3", ENDED, "yes</think>", Parsed("yes</think>")),
    ("deepseek_r1", PLAIN, "hm</think>yes", Parsed("yes", (), "hm")),
    ("deepseek_r1", PLAIN, "<think>\nhm</think>yes", Parsed("yes", (), "\nhm")),
    ("deepseek_r1", PLAIN, "cut off", Parsed("", (), "cut off")),
    ("deepseek_r1", OPENED, "hm</think>", Parsed("", (), "hm")),
    ("deepseek_r1", ENDED, "yes", Parsed("yes")),
    ("openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>a", Parsed("", (), "a")),
]


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), CASES)
def test_an_answer(name, prompt, text, expected):
    parser = parser_of(name, prompt)
    assert parser(text, True) == expected
    assert_adds_up(parser, text)


def test_calls_are_found_in_the_content_alone():
    parser = parser_of("qwen3", OPENED, parse_hermes)
    found = parser(f"I might {CALL}.</think>Now {CALL}", True)
    assert found == Parsed("Now", (FoundCall("f", "{}"),), f"I might {CALL}.")


def test_a_function_s_call_ends_the_reasoning():
    parser = parser_of("qwen3", OPENED, qwen3_coder_parser({}))
    text = f"hm <tool_call> is the mark\n{XML}"
    found = Parsed("", (FoundCall("f", "{}"),), "hm <tool_call> is the mark\n")
    assert parser(text, True) == found
    assert_adds_up(parser, text)


def test_harmony_s_calls_are_found_where_there_are_tools():
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    prompt = "<|start|>assistant"
    assert parser_of("openai_gptoss", prompt, parse_nothing)(text, True) == Parsed("{}")
    found = parser_of("openai_gptoss", prompt, parse_hermes)(text, True)
    assert found == Parsed("", (FoundCall("f", "{}"),))


PIECES = (*MARKS, "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "<function=f>")
WORDS = ("<", "a", "final", " to=functions.f", "</function>", '{"name": "f", "arguments": {}}')


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(REASONING_PARSERS)),
    st.sampled_from((PLAIN, OPENED, ENDED, "<|start|>assistant")),
    st.sampled_from((parse_nothing, parse_hermes, qwen3_coder_parser({}))),
    st.lists(st.sampled_from((*PIECES, *WORDS)), max_size=10).map("".join),
)
def test_a_stream_of_anything_adds_up(name, prompt, content, text):
    assert_adds_up(parser_of(name, prompt, content), text)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(("deepseek_r1", "qwen3")), st.lists(st.sampled_from((*PIECES, "a"))))
def test_no_text_is_lost(name, pieces):
    text = "a" + "".join(pieces)
    found = parser_of(name, OPENED)(text, True)
    # A call ends reasoning without a mark.
    assert found.reasoning + found.content in (text.replace("</think>", "", 1), text)
    assert "</think>" not in found.reasoning


def test_the_marks_of_each_are_known():
    assert set(PARSER_MARKS) == set(REASONING_PARSERS)

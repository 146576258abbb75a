from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.parsing import assert_adds_up
from sametoken.serving.http.harmony import MARKS
from sametoken.serving.http.json_calls import parse_hermes, parse_required
from sametoken.serving.http.parsed import FoundCall, Parsed, call_or_text, parse_nothing
from sametoken.serving.http.reasoning_parsers import REASONING_FORMS, ComingAnswer, RenderedPrompt
from sametoken.serving.http.tool_parsers import TOOL_PARSERS, named_parser
from sametoken.serving.http.xml_calls import glm_parser, qwen3_coder_parser
from sametoken.types.structured_outputs import Reasoning

PLAIN, OPENED, ENDED = "<|im_start|>assistant\n", "x<think>\n", "x<think>\n\n</think>\n\n"
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
XML = "<tool_call>\n<function=f>\n</function>\n</tool_call>"


HARMONY = "<|start|>assistant"


def parser_of(name, prompt=PLAIN, content=parse_nothing, *, is_constrained=False):
    rendered = RenderedPrompt(prompt)
    answer = ComingAnswer(rendered, content, False, is_constrained, functions=("f",))
    return REASONING_FORMS[name].parser(answer)


RESPONSE, ANSWER = "hm\n</think>\n\n<response>\n", "<answer>\na\n</answer>"
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
    ("mistral", "[/INST]", "[THINK]hm[/THINK]yes", Parsed("yes", (), "hm")),
    ("mistral", "[/THINK][/INST]", "<think>yes", Parsed("<think>yes")),
    ("gemma4", PLAIN, "<|channel>thought\nhm<channel|>yes", Parsed("yes", (), "hm")),
    ("gemma4", PLAIN, "<|channel>though", Parsed("", (), "though")),
    ("gemma4", PLAIN, "<|channel>hm<channel|>", Parsed("", (), "hm")),
    ("gemma4", "x<|channel>thought\n<channel|>", "yes", Parsed("yes")),
    ("kimi_k2", PLAIN, "hm</think>yes", Parsed("yes", (), "hm")),
    ("deepseek_v3", OPENED, "hm</think>yes", Parsed("yes", (), "hm")),
    ("deepseek_v3", PLAIN, "yes", Parsed("yes")),
    ("glm45", PLAIN, "\n<think>hm</think>\nyes", Parsed("\nyes", (), "hm")),
    ("glm47", OPENED, "hm <tool_call> f <arg", Parsed("", (), "hm <tool_call> f <arg")),
    ("openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>a", Parsed("", (), "a")),
    ("minimax_m2", OPENED, "hm</think>yes", Parsed("yes", (), "hm")),
    ("olmo3", "x<think>", "hm</think>yes", Parsed("yes", (), "hm")),
    ("seed_oss", PLAIN, "<seed:think>hm</seed:think>yes", Parsed("yes", (), "hm")),
    ("seed_oss", "x<seed:think><seed:cot_budget_reflect>", "</seed:think>yes", Parsed("yes")),
    ("ernie45", OPENED, "hm</think>yes", Parsed("yes", (), "hm")),
    ("ernie45", OPENED, f"{RESPONSE}a\n b\n</response>\n", Parsed("a\n b", (), "hm\n")),
    # The mark at the end alone ends the answer.
    ("ernie45", OPENED, f"{RESPONSE}</response>a", Parsed("</response>a", (), "hm\n")),
    ("ernie45", OPENED, f"{RESPONSE}a </resp", Parsed("a </resp", (), "hm\n")),
    ("ernie45", OPENED, "hm</think>\n<response", Parsed("\n<response", (), "hm")),
    ("ernie45", ENDED, "<response>a </response>", Parsed("a")),
    ("hunyuan_a13b", PLAIN, f"<think>\nhm</think>\n{ANSWER}", Parsed("a", (), "hm")),
    ("hunyuan_a13b", OPENED, f"hm</think>\n{ANSWER}", Parsed("a", (), "hm")),
    ("hunyuan_a13b", ENDED, ANSWER, Parsed("a")),
    ("hunyuan_a13b", PLAIN, "yes", Parsed("yes")),
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


GLM = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
KIMI = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
MINIMAX = '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'


@pytest.mark.parametrize(
    ("name", "tools", "call", "arguments"),
    [
        ("qwen3", "qwen3_coder", XML, "{}"),
        ("glm45", "glm45", GLM, '{"a": "1"}'),
        ("glm47", "glm47", "<tool_call>f</tool_call>", "{}"),
        ("kimi_k2", "kimi_k2", f"<|tool_calls_section_begin|>{KIMI}", "{}"),
        ("minimax_m2", "minimax_m2", MINIMAX, "{}"),
        ("seed_oss", "seed_oss", XML.replace("tool_call>", "seed:tool_call>"), "{}"),
    ],
)
def test_a_function_s_call_ends_the_reasoning(name, tools, call, arguments):
    parser = parser_of(name, OPENED, TOOL_PARSERS[tools]({}))
    thought = "hm <tool_call> is the mark, as in <tool_call>g</tool_call>\n"
    text = f"{thought}{call}"
    found = Parsed("", (FoundCall("f", arguments),), thought)
    assert parser(text, True) == found
    assert_adds_up(parser, text)


def test_calls_are_found_between_the_marks_of_an_answer():
    written = '[{"name": "f", "arguments": {"x": "</answer>"}}]'
    text = f"<think>\nhm</think>\n<answer>\nI look.\n<tool_calls>{written}</tool_calls>\n</answer>"
    parser = parser_of("hunyuan_a13b", PLAIN, TOOL_PARSERS["hunyuan_a13b"]({}))
    found = Parsed("I look.", (FoundCall("f", '{"x": "</answer>"}'),), "hm")
    assert parser(text, True) == found
    assert_adds_up(parser, text)


def test_harmony_s_calls_are_found_where_there_are_tools():
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    prompt = "<|start|>assistant"
    assert parser_of("openai_gptoss", prompt, parse_nothing)(text, True) == Parsed("{}")
    found = parser_of("openai_gptoss", prompt, parse_hermes)(text, True)
    assert found == Parsed("", (FoundCall("f", "{}"),))


@pytest.mark.parametrize("after", ["</tool_call>", "<arg_key>", "\n</tool_call>a"])
def test_a_section_that_begins_within_a_name_ends_the_reasoning_there(after):
    parser = parser_of("deepseek_r1", PLAIN, parse_nothing)
    found = Parsed(f"[TOOL_CALLS]{after}", reasoning="<tool_call>a")
    assert parser(f"<tool_call>a[TOOL_CALLS]{after}", True) == found
    assert_adds_up(parser, f"<tool_call>a[TOOL_CALLS]{after}")


CONTENTS = (parse_nothing, parse_hermes, qwen3_coder_parser({}), glm_parser({}), parse_required)
THINK = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "thought\n")
ANSWER_MARKS = ("<response>", "</response>", "<answer>", "</answer>", "</seed:think>")
CALL_MARKS = ("<tool_call>", "</tool_call>", "<function=f>", "<arg_key>", "[TOOL_CALLS]")
PIECES = (*MARKS, *THINK, *CALL_MARKS, *ANSWER_MARKS, "\n")
WORDS = ("<", "a", "final", " to=functions.f", "</function>", '{"name": "f", "arguments": {}}')


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(REASONING_FORMS)),
    st.sampled_from((PLAIN, OPENED, ENDED, HARMONY)),
    st.sampled_from((*CONTENTS, *(call_or_text(one, "<tool_call>") for one in CONTENTS))),
    st.booleans(),
    st.lists(st.sampled_from((*PIECES, *WORDS)), max_size=10).map("".join),
)
def test_a_stream_of_anything_adds_up(name, prompt, content, is_constrained, text):
    assert_adds_up(parser_of(name, prompt, content, is_constrained=is_constrained), text)


@settings(max_examples=100)
@given(st.sampled_from(("deepseek_r1", "qwen3")), st.lists(st.sampled_from((*PIECES, "a"))))
def test_no_text_is_lost(name, pieces):
    text = "a" + "".join(pieces)
    found = parser_of(name, OPENED)(text, True)
    # A call ends reasoning without a mark.
    assert found.reasoning + found.content in (text.replace("</think>", "", 1), text)
    assert "</think>" not in found.reasoning


CONSTRAINED = [
    ("qwen3", PLAIN, parse_nothing, "<think>hm</think>{}", Parsed("{}", (), "hm")),
    ("qwen3", PLAIN, parse_nothing, '{"a": "</think>"}', Parsed('{"a": "</think>"}')),
    # A call begins no grammar, so that it does not end the reasoning either.
    ("qwen3", OPENED, parse_nothing, f"hm {XML}</think>{{}}", Parsed("{}", (), f"hm {XML}")),
    ("deepseek_r1", PLAIN, named_parser("f"), "hm", Parsed("", (), "hm")),
    ("ernie45", PLAIN, parse_nothing, "hm</think><response>", Parsed("<response>", (), "hm")),
    (
        *("deepseek_r1", PLAIN, named_parser("f"), 'hm</think>{"a": 1}'),
        Parsed("", (FoundCall("f", '{"a": 1}'),), "hm"),
    ),
    (
        *("openai_gptoss", HARMONY, parse_nothing),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I answer.<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{}",
        Parsed("{}", (), "hm\nI answer."),
    ),
    ("openai_gptoss", HARMONY, parse_nothing, "{}", Parsed("{}")),
    (
        *("openai_gptoss", HARMONY, parse_required),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
        '[{"name": "f", "parameters": {}}]',
        Parsed("", (FoundCall("f", "{}"),), "hm"),
    ),
    # gpt-oss calls functions in a channel of their own, which no grammar constrains.
    (
        *("openai_gptoss", HARMONY, named_parser("f")),
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        Parsed("", (FoundCall("f", "{}"),)),
    ),
]


@pytest.mark.parametrize(("name", "prompt", "content", "text", "expected"), CONSTRAINED)
def test_a_constrained_answer(name, prompt, content, text, expected):
    parser = parser_of(name, prompt, content, is_constrained=True)
    assert parser(text, True) == expected
    assert_adds_up(parser, text)


IDS = {"<think>": 1, "</think>": 2, "<|start|>": 3, "<|channel|>": 4, "<|message|>": 5}
IN_ANALYSIS = f"{HARMONY}<|channel|>analysis<|message|>I "
IN_FINAL = f"{HARMONY}<|channel|>final<|message|>I "
OTHER_TURN = "<|im_start|>assistant\n<think>hm</think>yes<|im_end|>\n"
END_OF_HEADER = {"end": (4, *b"final"), "header_end": 5}


def encode(text: str) -> tuple[int, ...]:
    """A mark's token, or bytes."""
    return (IDS[text],) if text in IDS else tuple(text.encode())


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("qwen3", PLAIN, Reasoning((2,), begins=(1,))),
        ("qwen3", OTHER_TURN + PLAIN, Reasoning((2,), begins=(1,))),
        ("qwen3", OPENED, Reasoning((2,))),
        ("qwen3", ENDED, None),
        ("deepseek_r1", PLAIN, Reasoning((2,))),
        ("deepseek_r1", OPENED, Reasoning((2,))),
        ("deepseek_r1", ENDED, None),
        ("openai_gptoss", HARMONY, Reasoning(**END_OF_HEADER, begins=(3, 4))),
        ("openai_gptoss", f"{IN_FINAL}<|end|>", Reasoning(**END_OF_HEADER, begins=(3, 4))),
        ("openai_gptoss", IN_ANALYSIS, Reasoning(**END_OF_HEADER)),
        ("openai_gptoss", IN_FINAL, None),
    ],
)
def test_what_a_grammar_of_the_content_waits_for(name, prompt, expected):
    assert REASONING_FORMS[name].before_content(RenderedPrompt(prompt), encode) == expected


def test_a_grammar_waits_for_no_mark_that_is_several_tokens():
    for form, prompt in (("qwen3", PLAIN), ("deepseek_r1", OPENED), ("openai_gptoss", HARMONY)):
        rendered = RenderedPrompt(prompt)
        found = REASONING_FORMS[form].before_content(rendered, lambda text: tuple(text.encode()))
        assert found is None

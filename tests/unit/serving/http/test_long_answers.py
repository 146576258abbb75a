"""The work for an answer grows as its length does, counted and not timed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from helpers.fake_engine import FakeEngine
from sametoken.serving.http.harmony import parse_harmony
from sametoken.serving.http.json_calls import parse_required
from sametoken.serving.http.parsed import GrowingAnswer, Parser, parse_nothing, with_one_call
from sametoken.serving.http.reasoning_parsers import REASONING_FORMS, ComingAnswer, RenderedPrompt
from sametoken.serving.http.tool_parsers import TOOL_PARSERS, named_parser
from sametoken.types.growing import Beginning, GrowingText

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
REQUESTS = {
    "completions": ("/v1/completions", {"prompt": "hi", "logprobs": 1}, {}),
    "chat": ("/v1/chat/completions", MESSAGES | {"logprobs": True}, {}),
    "tools": ("/v1/chat/completions", MESSAGES | TOOLS, {"tool_call_parser": "hermes"}),
    "reasoning": ("/v1/chat/completions", MESSAGES, {"reasoning_parser": "deepseek_r1"}),
    "responses": ("/v1/responses", {"input": "hi", "top_logprobs": 1}, {}),
    "messages": ("/v1/messages", MESSAGES, {"reasoning_parser": "deepseek_r1"}),
}


@pytest.fixture
def copied(monkeypatch) -> Counter[str]:
    """Characters and tokens that are copied out of growing completions."""
    counts: Counter[str] = Counter()

    def counting(owner, name):
        read = getattr(owner, name)

        def counted(self, *args):
            value = read(self, *args)
            counts[name] += len(value or ())
            return value

        monkeypatch.setattr(owner, name, counted)

    counting(GrowingText, "part")
    counting(Beginning, "token_ids")
    counting(Beginning, "logprobs")
    return counts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_copies_each_token_and_character_once(serve, copied, name, stream):
    path, body, server = REQUESTS[name]
    most = "max_output_tokens" if name == "responses" else "max_tokens"
    size = 300
    answer = serve(FakeEngine("a" * size, window=1), **server).post(
        path, json=body | {"stream": stream, most: 400}
    )
    assert answer.status_code == 200, answer.text
    assert answer.text.count("a") >= size
    assert copied["part"] >= size
    # A whole answer and its usage may read the end of the text again.
    assert all(count <= 2 * (size + 1) for count in copied.values()), copied


def counted(parser: Parser, counts: Counter[str]) -> Parser:
    """A parser that counts the characters that it and the parsers of its rests read."""

    def parse(text: str, finished: bool):
        counts["read"] += len(text)
        parsed = parser(text, finished)
        if parsed.rest is None:
            return parsed
        rest = replace(parsed.rest, parser=counted(parsed.rest.parser, counts))
        return replace(parsed, rest=rest)

    return parse


def num_read(parser: Parser, text: str) -> int:
    counts: Counter[str] = Counter()
    answer = GrowingAnswer(counted(parser, counts))
    for start in range(0, len(text), 4):
        answer.read(text[start : start + 4], finished=False)
    answer.read("", finished=True)
    return counts["read"]


def think(name: str, content: Parser = parse_nothing) -> Parser:
    answer = ComingAnswer(RenderedPrompt("hi"), content, shows_marks=False)
    return REASONING_FORMS[name].parser(answer)


HERMES, QWEN, GLM, MISTRAL, OLMO = (
    TOOL_PARSERS[name]({}) for name in ("hermes", "qwen3_coder", "glm45", "mistral", "olmo3")
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
#: A parser, how its answer begins, and what repeats.
ANSWERS = {
    "text": (parse_nothing, "", "word "),
    "text with tools": (HERMES, "", "word "),
    "text after a call": (with_one_call(HERMES), CALL, "word "),
    "many calls": (HERMES, "", f"word {CALL}"),
    "many calls without an end": (MISTRAL, "", "[TOOL_CALLS]f[ARGS]{}"),
    "reasoning": (think("deepseek_r1"), "", "word "),
    "reasoning before text": (think("deepseek_r1", HERMES), "Hm.</think>", "word "),
    "text between marks": (think("ernie45", HERMES), "Hm.</think><response>", "word "),
    "xml": (QWEN, "", "word < "),
    "llama": (TOOL_PARSERS["llama3_json"]({}), "", "word "),
    "text after llama's call": (
        TOOL_PARSERS["llama3_json"]({}), '{"name": "f", "parameters": {}}', "word ",
    ),
    "analysis": (parse_harmony, "<|channel|>analysis<|message|>", "word "),
    "final": (parse_harmony, "<|channel|>final<|message|>", "word "),
    "messages": (
        think("openai_gptoss"), "", "<|channel|>analysis<|message|>word<|end|><|start|>assistant",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_parser_reads_the_text_a_few_times(name):
    parser, begin, repeated = ANSWERS[name]
    text = begin + repeated * (10_000 // len(repeated))
    # What is held back, as an open call, is read again with each piece of four characters.
    most = 2 + len(CALL) // 4 if "<" in repeated else 4
    assert num_read(parser, text) <= most * len(text)


@pytest.mark.parametrize(
    ("parser", "begin"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "'),
        (QWEN, "<tool_call><function=f><parameter=a>"),
        (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        (OLMO, "<function_calls>f(a='"),
        (parse_harmony, "<|channel|>commentary to=functions.f<|message|>"),
        (parse_required, '[{"name": "f", "parameters": {"a": "'),
        (named_parser("f"), '{"a": "'),
    ],
)
def test_a_long_call_is_read_in_nearly_linear_time(parser, begin):
    sizes = 50_000, 100_000
    small, large = (num_read(parser, begin + "a" * size) for size in sizes)
    assert large < 2.1 * small

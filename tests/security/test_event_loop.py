"""Work that grows with a request leaves the event loop to its neighbours."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial

import pytest

from helpers.budgets import heartbeat
from helpers.fake_engine import SUMMARY, FakeEngine
from sametoken.engine.user_inputs import PromptTokens
from sametoken.serving.http.app import create_app
from sametoken.serving.http.chat import _Answer, _ChoiceWriter
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.gemma_calls import parse_gemma4
from sametoken.serving.http.harmony import parse_harmony
from sametoken.serving.http.in_process import AppRequest, whole_answer
from sametoken.serving.http.json_calls import parse_hermes, parse_required
from sametoken.serving.http.named_calls import parse_kimi_k2, parse_mistral
from sametoken.serving.http.schemas import ChatRequest
from sametoken.serving.http.served import Served
from sametoken.serving.http.tools import ToolUse
from sametoken.text.stop_strings import StopCursor, StopStrings
from sametoken.types.outputs import CompletionOutput
from sametoken.types.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
)

HEADERS = ((b"content-type", b"application/json"),)
MOST = ServerConfig().max_request_bytes


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    return before + item * ((MOST - len(before) - len(after)) // len(item)) + after


#: Made where they are sent: each takes megabytes.
BODIES = {
    "ids": partial(filled, b'{"prompt":[', b"5,", b"5]}"),
    "texts": partial(filled, b'{"prompt":[', b'"a",', b'"a"]}'),
    "empty lists": partial(filled, b'{"prompt":[', b"[],", b"[]]}"),
    "ids after a text": partial(filled, b'{"prompt":["a",', b"12345,", b"5]}"),
    "texts after an id": partial(filled, b'{"prompt":[5,', b'"a",', b"5]}"),
    "messages": partial(filled, b'{"messages":[', b'{"role":"u","content":"x"},', b"1]}"),
    "no messages": lambda: b'{"messages":[' + b"1," * 20_000 + b"1]}",
    "unknown fields": lambda: b"{" + b",".join(b'"%d":1' % i for i in range(350_000)) + b"}",
    "objects": partial(filled, b'{"prompt":"x","metadata":[', b"{},", b"1]}"),
    "digits": partial(filled, b'{"prompt":"x","metadata":[', b"9" * 4000 + b",", b"1]}"),
    "stops": partial(filled, b'{"prompt":"x","stop":[', b'"ab",', b'"c"]}'),
    "bad words": partial(filled, b'{"prompt":"x","bad_words":[', b'"ab",', b'"c"]}'),
}


async def ask(engine: FakeEngine, path: str, body: bytes) -> tuple[int, float]:
    """The status of an answer, and what the process works in the loop's longest gap, in seconds.

    Not the time that passes, which is longer where other processes share the cores.
    """
    app = create_app(engine, ServerConfig())
    await whole_answer(app, AppRequest("GET", "/version"))
    async with heartbeat() as heart:
        status, _ = await whole_answer(app, AppRequest("POST", path, headers=HEADERS, body=body))
    return status, heart.longest_cpu_s


@pytest.mark.parametrize("kind", BODIES)
def test_no_body_stops_the_loop(kind):
    path = "/v1/chat/completions" if "messages" in kind else "/v1/completions"
    status, longest_s = asyncio.run(ask(FakeEngine(), path, BODIES[kind]()))
    assert status == 400
    assert longest_s < 1.5


def test_the_most_bad_words_and_stop_strings_are_read_off_the_loop():
    words = [f"{i} ".ljust(MAX_BAD_WORD_CHARS, "x") for i in range(MAX_BAD_WORDS)]
    stops = [f"{i} ".ljust(MAX_STOP_CHARS, "y") for i in range(MAX_STOPS)]
    body = json.dumps({"prompt": "x", "bad_words": words, "stop": stops}).encode()
    status, longest_s = asyncio.run(ask(FakeEngine("hello"), "/v1/completions", body))
    assert status == 200
    assert longest_s < 0.9


def test_many_bad_words_take_time_in_proportion():
    engine = FakeEngine()
    words = [f"w{i}" for i in range(MAX_BAD_WORDS)]
    encode, calls = engine.tokenizer.encode, []
    engine.tokenizer.encode = lambda *a, **k: calls.append(1) or encode(*a, **k)
    params = SamplingParams(bad_words=words)
    prompts = [PromptTokens(None, (1,))] * 64
    began = time.monotonic()
    engine._inputs.process_all("r", prompts, params)
    # Once for a whole HTTP request, not for each of its prompts.
    assert len(calls) == 2 * MAX_BAD_WORDS
    assert time.monotonic() - began < 10


def test_a_character_costs_the_same_however_many_stop_strings_there_are():
    stops = tuple("a" * (MAX_STOP_CHARS - 8) + f"{i:08}" for i in range(MAX_STOPS))
    cursor = StopCursor(StopStrings(stops))
    began = time.thread_time()
    for _ in range(20_000):
        assert cursor.feed("aaaa", checked=True) is None
        assert cursor.num_held <= MAX_STOP_CHARS - 8
    assert cursor.num_held == MAX_STOP_CHARS - 8
    assert time.thread_time() - began < 3


KIMI_CALL = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        (parse_kimi_k2, f"{KIMI_CALL}{{}}"),
        (parse_kimi_k2, f"{KIMI_CALL}{{<|tool_call_end|>"),
        (parse_kimi_k2, f"{KIMI_CALL}x<|tool_call_end|>"),
        (parse_mistral, "[TOOL_CALLS]f[ARGS]{"),
        (parse_gemma4, "<|tool_call>call:f{}"),
        (parse_gemma4, "<|tool_call>call:f{<tool_call|>"),
    ],
)
def test_many_calls_at_once_are_read_in_linear_time(parser, call):
    num_calls = 500_000 // len(call)
    began = time.thread_time()
    assert len(parser(call * num_calls, True).calls) == num_calls
    assert time.thread_time() - began < 3


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (parse_hermes, '<tool_call>{"name": "f", "arguments": {"a": [' + "[1, 2], " * 8000),
        (parse_hermes, '<tool_call>{"x": [' + "[1, 2], " * 8000),
        (parse_hermes, '<tool_call>{"name": "f", "arguments": {"a": "' + "</tool_call>" * 5000),
        (parse_kimi_k2, f'{KIMI_CALL}{{"a": "' + KIMI_CALL * 2000),
        (parse_gemma4, '<|tool_call>call:f{a:<|"|>' + "<tool_call|>" * 5000),
        (parse_required, '[{"name": "f", "parameters": {"a": [' + '{"b": 1}, ' * 6000),
        (parse_required, " " * 60_000),
        (parse_harmony, " to=functions.f<|message|>" + "[1, 2], " * 8000),
        (parse_harmony, "<|channel|>" * 2000),
    ],
    ids=["call", "no call", "tags", "kimi", "gemma", "required", "spaces", "harmony", "marks"],
)
def test_a_long_call_in_a_stream_is_not_read_anew_for_each_token(parser, text):
    request = ChatRequest(messages=[{"role": "user", "content": "x"}])
    served = Served(engine=None, config=None, times=None, defaults=None)
    answer = _Answer(request, ToolUse(None, parser, None), "chatcmpl-1", "m", served)
    writer = _ChoiceWriter(answer, 0)
    longest, began = 0.0, time.thread_time()
    sent = ""
    for end in range(4, len(text), 4):
        step = time.thread_time()
        for piece in writer.write(CompletionOutput(0, text[:end], ())):
            for call in piece.delta.tool_calls or []:
                sent += call.function.arguments
        longest = max(longest, time.thread_time() - step)
    for piece in writer.write(CompletionOutput(0, text, (), finish_reason="length")):
        for call in getattr(piece.delta, "tool_calls", None) or []:
            sent += call.function.arguments
    calls = parser(text, True).calls
    assert sent == (calls[0].arguments if calls else "")
    assert time.thread_time() - began < 6
    assert longest < 0.5


def test_a_prompt_too_long_for_the_model_costs_the_loop_little():
    ids = [5] * 1_000_000
    body = json.dumps({"prompt": ids}).encode()
    status, longest_s = asyncio.run(ask(FakeEngine(), "/v1/completions", body))
    assert status == 400
    assert longest_s < 1
    assert SUMMARY.max_model_len < len(ids)

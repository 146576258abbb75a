"""Streams of an OpenAI server, and loads of many of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import httpx
import pytest

from sametoken.bench import openai_stream
from sametoken.bench.measure import Window
from sametoken.bench.openai_stream import (
    Endpoint,
    Load,
    LoadRun,
    ServedRequest,
    run_load,
    send,
    served_trace,
    traced_body,
)
from sametoken.bench.serving_numbers import serving_numbers
from sametoken.errors import ConfigError

ENDPOINT = Endpoint("/v1/completions", "m", is_chat=False)
DONE = "data: [DONE]\n\n"


def event(**fields) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def text(piece: str, reason: str | None = None, **more) -> str:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": reason, **more}])


def said(piece: str | None, **more) -> str:
    return event(choices=[{"index": 0, "delta": {"role": "assistant", "content": piece, **more}}])


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def ask(
    answer: str | AsyncIterator[bytes] | Exception, status: int = 200, endpoint: Endpoint = ENDPOINT
):
    """The record of one request to a server that answers so; each look at the clock is 1 s."""

    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        body = answer.encode() if isinstance(answer, str) else answer
        return httpx.Response(status, content=body)

    async def run():
        transport = httpx.MockTransport(handle)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            record = ServedRequest(3, 0.0)
            body = endpoint.body("hello", 5, 0.5, 9)
            ticks = itertools.count(1.0)
            await send(client, endpoint, body, record, clock=lambda: next(ticks))
            return record

    return asyncio.run(run())


def test_times_and_counts_of_a_stream():
    # The clock ticks once when the request is sent and once for every event.
    answer = text("a") + text("bc") + text("", "length") + event(choices=[], usage=USAGE) + DONE
    record = ask(answer)
    assert record.error is None
    assert (record.sent, record.events, record.texts) == (1.0, [2.0, 3.0], ["a", "bc"])
    assert (record.num_prompt_tokens, record.num_tokens, record.counted) == (7, 5, True)
    assert (record.ttft, record.e2e, record.finish_reason) == (1.0, 2.0, "length")
    assert record.tpot == pytest.approx(1 / 4)


def test_a_text_may_hold_what_unicode_calls_the_end_of_a_line():
    piece = "a\u2028b\x85c"
    raw = json.dumps({"choices": [{"index": 0, "text": piece}]}, ensure_ascii=False)
    record = ask(f"data: {raw}\r\n\r\n" + text("d", "stop") + "data: [DONE]")
    assert (record.error, record.texts) == (None, [piece, "d"])


def test_without_usage_events_are_counted_and_it_is_said():
    record = ask(text("a") + text("b", "stop") + DONE)
    assert (record.num_tokens, record.counted, record.error) == (2, False, None)


def test_one_token_has_no_time_per_later_token():
    assert ask(text("a", "length") + DONE).tpot is None


def test_chat_counts_thoughts_and_calls_but_not_the_role():
    call = [{"index": 0, "function": {"name": "f", "arguments": "{"}}]
    answer = said("") + said(None, reasoning_content="hm") + said("yes") + said(None) + DONE
    record = ask(answer + text(""), endpoint=Endpoint("/chat", "m", is_chat=True))
    assert record.texts == ["hm", "yes"]
    assert ask(said(None, tool_calls=call) + DONE).texts == ["f{"]


def test_the_first_token_of_a_stream_that_reasons_is_its_first_reasoning():
    answer = said("") + said(None, reasoning="h") + said(None, reasoning="m") + said("yes") + DONE
    record = ask(answer, endpoint=Endpoint("/chat", "m", is_chat=True))
    # The clock ticks at the request, the role and every later event.
    assert (record.sent, record.events, record.ttft) == (1.0, [3.0, 4.0, 5.0], 2.0)
    assert record.texts == ["h", "m", "yes"]


def test_bodies_are_those_of_completions_and_of_chat():
    body = ENDPOINT.body("hello", 5, 0.5, 9)
    assert (body["prompt"], body["max_tokens"], body["seed"], body["model"]) == ("hello", 5, 9, "m")
    assert body["stream_options"] == {"include_usage": True}
    assert "include_speculation_stats" not in body
    ours = Endpoint("/c", "m", is_chat=True, has_stats=True, extra={"top_k": 3})
    body = ours.body("hello", 5, 0.5, 9)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["include_speculation_stats"], body["top_k"], "prompt" in body) == (True, 3, False)


@pytest.mark.parametrize(
    ("answer", "status", "cause"),
    [
        ('{"error": {"message": "no such model"}}', 404, "HTTP 404: no such model"),
        ("busy", 503, "HTTP 503: busy"),
        (event(error={"message": "it broke"}), 200, "error event: it broke"),
        (text("a"), 200, "ended before the answer"),
        (DONE, 200, "held no token"),
        ("data: {no json}\n\n", 200, "not as OpenAI has it"),
        (event(choices=[3]) + DONE, 200, "not as OpenAI has it"),
        (httpx.ConnectError("refused"), 200, "refused"),
        (httpx.ReadTimeout(""), 200, "ReadTimeout"),
    ],
)
def test_every_failure_is_noted(answer, status, cause):
    record = ask(answer, status)
    assert cause in record.error


OURS = {
    "num_steps": 3,
    "num_draft_tokens": 9,
    "num_accepted_tokens": 2,
    "acceptance_length": 5 / 3,
    "acceptance_rate": 2 / 9,
    "acceptance_per_position": [1 / 3, 1 / 3, 0],
    "offered_per_position": [3, 3, 3],
}


def test_our_stats_and_vllms_have_the_same_names():
    ours = OURS
    record = ask(text("a", "stop") + event(choices=[], speculation=ours) + DONE)
    assert (record.speculation, record.windows) == (ours, ())
    steps = {"per_step_drafted": [0, 3, 3], "per_step_accepted": [0, 2, 0]}
    record = ask(text("a", "stop") + event(choices=[], speculation=ours | steps) + DONE)
    assert record.speculation == ours
    assert record.windows == (Window(0, 0, 0), Window(1, 3, 2), Window(4, 3, 0))
    theirs = {
        "mean_acceptance_length": 1.75,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [2, 1, 1, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 12,
        "num_spec_tokens": 3,
        "per_step_accepted": [0, 2, 1, 0],
        "per_step_drafted": [3, 3, 3, 3],
    }
    last = event(choices=[], usage=USAGE, metrics={"speculative_decoding": theirs})
    record = ask(text("a", "stop") + last + DONE)
    assert record.speculation["acceptance_per_position"] == [0.5, 0.25, 0.0]
    assert record.speculation["offered_per_position"] == [4, 4, 4]
    assert record.speculation["num_accepted_tokens"] == 3
    assert record.windows == (
        Window(0, 0, 0),
        Window(1, 3, 0),
        Window(2, 3, 2),
        Window(5, 3, 1),
        Window(7, 3, 0),
    )


@pytest.mark.parametrize(
    "stats",
    [
        {"speculation": {"accepted": 3}},
        {"speculation": [3]},
        {"speculation": OURS | {"num_steps": "3"}},
        {"speculation": OURS | {"offered_per_position": [3]}},
        {"speculation": OURS | {"per_step_drafted": [3], "per_step_accepted": [0, 1]}},
        {"metrics": [3]},
        {"metrics": {"speculative_decoding": {"acceptance_histogram": "none"}}},
    ],
)
def test_stats_of_another_form_lose_no_answer(stats):
    record = ask(text("a", "stop") + event(choices=[], **stats) + DONE)
    assert (record.error, record.texts) == (None, ["a"])
    run = LoadRun(0.0, [record])
    numbers = serving_numbers([run], ())
    assert (numbers["num_requests"], numbers["speculation"]["requests"]) == (1, None)


def test_a_line_without_end_is_one_failure(monkeypatch):
    monkeypatch.setattr(openai_stream, "MAX_LINE_BYTES", 100)
    assert "a line of the stream has more than 100 bytes" in ask("data: " + 100 * "a").error
    assert ask(text("a" * 30, "stop") + DONE).error is None


def test_a_long_line_is_not_copied_for_each_of_its_pieces():
    raw = (text("a" * 2**22, "stop") + DONE).encode()

    async def pieces():
        for i in range(0, len(raw), 1024):
            yield raw[i : i + 1024]

    begun = time.process_time()
    assert list(map(len, ask(pieces()).texts)) == [2**22]
    # It is linear; copies for each piece took 175 s for four times as much.
    assert time.process_time() - begun < 3


def traced_stream(*pieces: list[tuple[int, str]]) -> str:
    return "".join(
        text(
            "".join(token for _, token in piece),
            token_ids=[token_id for token_id, _ in piece],
            logprobs={"tokens": [token for _, token in piece]},
        )
        for piece in pieces
    )


def test_a_trace_takes_each_event_for_a_window_where_windows_are_not_told():
    record = ask(traced_stream([(5, "a")], [(6, "b"), (7, "c")]) + text("", "stop") + DONE)
    trace = served_trace(record)
    assert (trace["token_ids"], trace["texts"]) == ([5, 6, 7], ["a", "b", "c"])
    assert trace["windows"] == [
        {"first": 0, "num_drafts": None, "num_accepted": 0},
        {"first": 1, "num_drafts": None, "num_accepted": 1},
    ]


def test_no_trace_without_tokens():
    assert served_trace(ask(text("a", "stop") + DONE)) is None
    assert served_trace(ask("busy", 503)) is None


def test_a_trace_asks_for_tokens():
    assert traced_body({"a": 1}, is_chat=False) == {"a": 1, "return_token_ids": True, "logprobs": 0}
    assert traced_body({}, is_chat=True)["top_logprobs"] == 0
    ours = traced_body({"include_speculation_stats": True}, is_chat=True)
    assert ours["include_speculation_stats"] == "detailed"


def test_poisson_times_follow_from_the_seed():
    due = Load(request_rate=5.0, seed=1).due(4001)
    assert due == Load(request_rate=5.0, seed=1).due(4001)
    assert due != Load(request_rate=5.0, seed=2).due(4001)
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert due[0] == 0.0
    assert min(gaps) > 0
    # Gaps of a Poisson process have mean and deviation 1 / rate.
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)


def test_without_a_rate_all_are_due_at_once():
    assert Load(concurrency=2).due(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("given", [{"concurrency": 0}, {"request_rate": 0}, {"request_rate": -1}])
def test_impossible_loads_are_refused(given):
    with pytest.raises(ConfigError, match="is not possible"):
        Load(**given)


def run(load, count):
    """The run, and the most that were sent at once."""
    at_once = most = 0

    async def send(body, record):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001 * (count - record.index))
        record.events, record.num_tokens = [record.arrival + 2.0 + body["n"]], 1
        if body["n"] == 1:
            record.error = "failed"
        at_once -= 1

    done = []
    bodies = [{"n": n} for n in range(count)]
    result = asyncio.run(run_load(send, bodies, load, advance=lambda: done.append(1)))
    assert len(done) == count
    return result, most


def test_no_more_run_at_once_than_asked():
    for concurrency, expected in ((1, 1), (2, 2), (None, 5)):
        result, most = run(Load(concurrency=concurrency), 5)
        assert most == expected
        assert [record.index for record in result.requests] == list(range(5))


def test_failed_requests_are_kept_but_not_done():
    result, _ = run(Load(concurrency=3), 3)
    assert len(result.requests) == 3
    assert [record.index for record in result.done] == [0, 2]
    assert result.seconds == pytest.approx(4.0)

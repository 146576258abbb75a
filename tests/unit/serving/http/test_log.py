"""What a server logs: its load, and requests except polls."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from sametoken.serving.http.log import LoadLog, PollFilter, log_load
from sametoken.serving.stats import EngineLoad, StatsCollector
from sametoken.types.outputs import SpeculationMetrics

EMPTY = StatsCollector(4).snapshot()
BUSY = replace(
    EMPTY,
    num_prompt_tokens=200,
    num_output_tokens=50,
    speculation=SpeculationMetrics(20, 40, 30),
    load=EngineLoad(
        num_running=3,
        num_waiting=1,
        num_swapped=1,
        kv_usage=0.125,
        prefix_cache_queries=100,
        prefix_cache_hits=40,
    ),
)


def test_a_line_is_about_the_time_since_the_one_before():
    log = LoadLog(EMPTY, 100.0)
    assert log.line(BUSY, 110.0) == (
        "running 3, waiting 2; tokens/s in 20.0, out 5.0; KV 12.5%, prefix cache hits 40.0%; "
        "drafts accepted 75.0%, acceptance length 2.50"
    )
    more = replace(
        BUSY,
        num_output_tokens=80,
        speculation=SpeculationMetrics(50, 40, 30),
        load=replace(BUSY.load, num_waiting=0, num_swapped=0),
    )
    # Steps without drafts have no acceptance, and nothing was looked up.
    assert log.line(more, 115.0) == "running 3, waiting 0; tokens/s in 0.0, out 6.0; KV 12.5%"


def test_idle_is_said_once():
    log, ended = LoadLog(EMPTY, 0.0), replace(BUSY, load=EngineLoad())
    assert log.line(EMPTY, 10.0) is None
    assert log.line(BUSY, 20.0) is not None
    assert log.line(ended, 30.0) == "running 0, waiting 0; tokens/s in 0.0, out 0.0; KV 0.0%"
    assert log.line(ended, 40.0) is None
    assert log.line(replace(ended, num_output_tokens=51), 50.0) is not None


@pytest.mark.parametrize("num_queries", [7, 107])
def test_an_engine_that_starts_again_counts_from_zero(num_queries):
    log = LoadLog(BUSY, 0.0)
    started = replace(BUSY, load=EngineLoad(num_running=1, prefix_cache_queries=num_queries))
    assert log.line(started, 10.0) == "running 1, waiting 0; tokens/s in 0.0, out 0.0; KV 0.0%"


async def test_lines_are_logged_until_the_server_ends(caplog):
    with caplog.at_level(logging.INFO, "sametoken.server"):
        task = asyncio.create_task(log_load(iter([EMPTY, BUSY, BUSY]).__next__, 0.0))
        while len(caplog.records) < 2:
            await asyncio.sleep(0)
        task.cancel()
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "running 3, waiting 2"
    ] * 2


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        ("/health", False),
        ("/metrics?name=a", False),
        ("/llm/ready", False),
        ("/", True),
        ("/v1/completions", True),
        ("/healthy", True),
        ("/v1/models?x=/health", True),
    ],
)
def test_polls_are_not_logged(path, logged):
    text = '%s - "%s %s HTTP/%s" %d'
    arguments = ("127.0.0.1:9", "GET", path, "1.1", 200)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, text, arguments, None)
    assert PollFilter("/llm").filter(record) == logged
    other = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "a line", None, None)
    assert PollFilter().filter(other)

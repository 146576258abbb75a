"""``sametoken bench serve``: what was measured outlives an interrupt."""

from __future__ import annotations

import asyncio
import json
import signal

import httpx
import pytest

from helpers.cli import invoke
from sametoken.bench import serving

ANSWER = 'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
OPTIONS = ("--num-prompts", "1", "--warmup", "0", "--trace", "0", "--concurrency", "1,2,3")


@pytest.fixture
def bench(monkeypatch):
    """Runs the command against a server; Ctrl-C is pressed in place of its Nth answer."""

    def run(nth: int, *arguments: str):
        answers = iter([ANSWER] * (nth - 1))

        async def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            if request.url.path == "/metrics":
                return httpx.Response(404)
            text = next(answers, None)
            if text is None:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(60)
            return httpx.Response(200, text=text)

        transport = httpx.MockTransport(handle)
        monkeypatch.setattr(
            serving,
            "open_client",
            lambda server: httpx.AsyncClient(transport=transport, base_url=server.url),
        )
        return invoke("bench", "serve", *OPTIONS, *arguments)

    return run


def test_loads_that_have_finished_are_shown_and_written_after_an_interrupt(bench, tmp_path):
    output = tmp_path / "run.json"
    result = bench(3, "--output", str(output), "--json")
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert [one["concurrency"] for one in document["results"]] == [1, 2]
    assert document["missing_loads"] == [{"concurrency": 3, "request_rate": None}]
    assert json.loads(output.read_text()) == document
    shown = bench(2)
    assert (shown.exit_code, "1 at once" in shown.stdout) == (130, True)
    assert "\nnot measured: 2 at once\nnot measured: 3 at once\n" in shown.stdout


def test_a_measurement_that_is_complete_misses_no_load(bench):
    result = bench(4, "--json")
    assert (result.exit_code, json.loads(result.stdout)["missing_loads"]) == (0, [])


def test_an_interrupt_of_the_first_load_leaves_nothing(bench, tmp_path):
    result = bench(1, "--output", str(tmp_path / "run.json"))
    assert (result.exit_code, result.stdout) == (130, "")
    assert not list(tmp_path.iterdir())


def test_options_with_vllm_s_names_too_stand_and_take_units_as_others_do(bench):
    assert bench(9, "--num-warmups", "0k").exit_code == 0
    shown = invoke("bench", "serve", "--help").stdout
    assert shown.index("Server options:") < shown.index("--url, --base-url")

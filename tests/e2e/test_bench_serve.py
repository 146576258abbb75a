"""Load on a real server: its counts are ours, its failures are told, its windows are kept."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from helpers.chat_model import write_chat_model
from helpers.commands import run_command
from helpers.http_server import running_server
from sametoken.bench import documents
from sametoken.cli.main import app
from sametoken.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = write_chat_model(tmp_path_factory.mktemp("served") / "model")
    with running_server(
        model, engine={"speculative_config": NGRAM}, served_model_name=("tiny",)
    ) as running:
        yield running


def bench(server, *arguments):
    url = server if isinstance(server, str) else server.url
    return CliRunner().invoke(app, ["bench", "serve", "--url", url, *arguments])


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = [f"{word} the inner the other the inner the other the" for word in ("a", "in", "er")]
    path.write_text("\n".join(map(json.dumps, texts)))
    return ("--dataset", "custom", "--path", str(path), "--num-prompts", "4", "--output-len", "12")


def test_a_measurement_holds_together(server, prompts, tmp_path):
    output = tmp_path / "run.json"
    arguments = ("--concurrency", "1,3", "--repeats", "2", "--ignore-eos", "--output", str(output))
    goals = ("--goodput", "ttft:60000", "tpot:60000")
    result = bench(server, *prompts, *arguments, *goals)
    assert result.exit_code == 0, result.output
    assert "acceptance length" in result.stdout
    value = json.loads(output.read_text())
    assert value["settings"]["asked"]["speculative_config"]["method"] == "ngram"
    assert [numbers["concurrency"] for numbers in value["results"]] == [1, 3]
    for numbers in value["results"]:
        assert (numbers["num_requests"], numbers["num_failed"]) == (8, 0)
        assert numbers["num_tokens"] == 8 * 12
        assert numbers["goodput"] == pytest.approx(numbers["requests_per_second"])
        metrics, told = numbers["speculation"]["metrics"], numbers["speculation"]["requests"]
        # The server's counters and the requests' own stats count the same drafts.
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            assert metrics[name] == told[name] > 0
        assert numbers["acceptance_length"] == metrics["acceptance_length"]
        assert all(times["output_len"] == 12 for times in numbers["timeline"])
    (trace,) = value["results"][-1]["traces"]
    assert len(trace["token_ids"]) == len(trace["texts"]) == 12
    assert sum(window["num_accepted"] + 1 for window in trace["windows"]) == 12


def test_chat_and_poisson_arrivals(server):
    arguments = ("--dataset", "gsm8k", "--num-prompts", "3", "--output-len", "4")
    result = bench(server, *arguments, "--request-rate", "50", "--json", "--trace", "0")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["workload"]["api"] == "chat"
    (numbers,) = value["results"]
    assert (numbers["request_rate"], numbers["num_requests"]) == (50.0, 3)
    arrivals = [times["arrival"] for times in numbers["timeline"]]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 3


def test_results_are_shown_where_the_file_cannot_be_written(server, prompts, tmp_path, monkeypatch):
    def refuse(path, value):
        raise ConfigError(f"{path} cannot be written", "make room")

    monkeypatch.setattr(documents, "write_json", refuse)
    result = bench(server, *prompts, "--output", str(tmp_path / "run.json"))
    assert result.exit_code == 2
    assert "requests answered" in result.stdout
    assert "cannot be written. Make room" in result.stderr


def test_a_measurement_of_a_server_loads_no_tensors(server, prompts, tmp_path):
    """Seconds and hundreds of megabytes that a client of HTTP has no use for."""
    output = str(tmp_path / "run.json")
    asked = ["bench", "serve", "--url", server.url, *prompts, "--output", output]
    shown, loaded = run_command(asked, ("torch", "triton", "transformers"))
    assert loaded == []
    assert "acceptance length" in shown


def test_failures_are_counted_named_and_in_the_exit_code(server, prompts):
    result = bench(server, *prompts, "--extra-body", '{"no_such_field": 1}', "--warmup", "0")
    assert result.exit_code == 1
    assert "4 failed: HTTP 400: unknown field 'no_such_field'" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--model", "other"), "does not serve 'other'"),
        (("--goodput", "ttft"), "is no goal"),
        (("--concurrency", "two"), "not a list of numbers"),
        (("--dataset", "nothing"), "'nothing' is not known"),
    ],
)
def test_wrong_use_is_one_error(server, arguments, cause):
    result = bench(server, *arguments)
    assert result.exit_code == 2
    assert cause in result.stderr


def test_a_server_that_wants_a_key(tmp_path):
    with running_server(write_chat_model(tmp_path / "model"), api_key=("key",)) as guarded:
        result = bench(guarded, "--api-key", "wrong")
    assert result.exit_code == 2
    assert "lists no models (status 401)" in result.stderr
    assert "--api-key" in result.stderr


def test_a_server_that_is_not_there():
    result = bench("http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "lists no models" in result.stderr

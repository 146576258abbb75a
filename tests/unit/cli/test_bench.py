"""``sametoken bench``: options, presets, one JSON object, and what is made up said aloud."""

from __future__ import annotations

import json
from functools import partial

import pytest

from helpers.checkpoints import write_config
from helpers.cli import invoke
from sametoken.bench import documents
from sametoken.bench import session as session_module
from sametoken.bench.memory import Memory, SwapLimits
from sametoken.bench.roofline import Bandwidth
from sametoken.cli.bench import _workload
from sametoken.cli.report import memory_report
from sametoken.engine.request_memory import RequestMemory
from sametoken.errors import ConfigError

SMALL = ("--input-len", "8", "--output-len", "6", "--load-format", "dummy")
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SYNTHETIC = NGRAM | {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.64],
}
run = partial(invoke, "bench")


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A config without weights, on a machine whose memory is measured at once."""
    write_config(tmp_path)
    monkeypatch.setattr(session_module, "read_bandwidth", lambda device: Bandwidth(1e9, "a guess"))
    return str(tmp_path)


def asked(**given):
    names = ("input_len", "output_len", "concurrency", "temperature", "seed", "preset")
    return dict.fromkeys(names) | given


def test_latency_prints_a_table_for_every_concurrency(target):
    result = run("latency", target, *SMALL, "--concurrency", "1,3", "--num-iters", "2")
    assert result.exit_code == 0, result.output
    assert "DUMMY WEIGHTS: only times mean anything" in result.stdout
    assert "latency, 2 batches: 8 in, 6 out, temperature 0" in result.stdout
    (heading,) = [line for line in result.stdout.splitlines() if "requests at once" in line]
    assert heading.replace("┃", " ").split()[-2:] == ["1", "3"]
    for row in ("decode step, median ms", "first token, p99 ms", "reached", "acceptance length"):
        assert row in result.stdout
    assert "SYNTHETIC" not in result.stdout
    assert "loading" in result.stderr


def test_brackets_of_a_path_are_text(target, tmp_path):
    model = write_config(tmp_path / "a[" / "x]")
    result = run("latency", str(model), *SMALL, "--num-iters", "1")
    assert result.exit_code == 0, result.output
    assert f"loading {model}" in result.stderr


def test_throughput_is_one_json_object(target):
    arguments = ("--num-prompts", "5", "--concurrency", "2", "--seed", "3", "--json")
    result = run(
        "throughput", target, *SMALL, *arguments, "--speculative-config", json.dumps(NGRAM)
    )
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["synthetic"] == ["dummy weights"]
    (numbers,) = value["results"]
    assert (numbers["concurrency"], numbers["num_requests"], numbers["num_tokens"]) == (2, 5, 30)
    assert value["workload"]["seed"] == 3
    assert value["settings"]["asked"]["speculative_config"]["num_speculative_tokens"] == 2
    assert value["settings"]["asked"]["enable_prefix_caching"] is False
    assert value["environment"]["date"]
    assert value["bandwidth"] == {"bytes_per_second": 1e9, "method": "a guess"}


def test_synthetic_acceptance_is_said_wherever_results_are(target):
    arguments = (*SMALL, "--num-iters", "1", "--speculative-config", json.dumps(SYNTHETIC))
    shown = run("latency", target, *arguments).stdout
    assert "DUMMY WEIGHTS, SYNTHETIC ACCEPTANCE: only times mean anything" in shown
    value = json.loads(run("latency", target, *arguments, "--json").stdout)
    assert value["synthetic"] == ["dummy weights", "synthetic acceptance"]


def test_a_preset_gives_defaults_that_options_override():
    options = {"enable_prefix_caching": False}
    peer = _workload(asked(preset="peer"), options)
    assert (peer.input_len, peer.output_len, peer.concurrency) == (512, 256, (1, 8, 64))
    changed = _workload(asked(preset="peer", concurrency="4", seed=7), options)
    assert (changed.input_len, changed.concurrency, changed.seed) == (512, (4,), 7)
    assert _workload(asked(temperature=0.7), options).temperature == 0.7


@pytest.mark.parametrize(
    ("given", "caching", "cause"),
    [
        ({"preset": "pier"}, False, "'pier' is not known. Use 'peer'"),
        ({"preset": "peer"}, True, "no prefix cache"),
        ({"concurrency": "1;2"}, False, "not a list of numbers"),
        ({"concurrency": "9" * 400}, False, "not a list of numbers"),
        ({"concurrency": "0"}, False, "concurrency=0"),
    ],
)
def test_what_makes_no_workload_is_refused(given, caching, cause):
    with pytest.raises(ConfigError, match=cause):
        _workload(asked(**given), {"enable_prefix_caching": caching})


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--dataset", "nothing"), "'nothing' is not known. Use gsm8k, "),
        (("--dataset", "spec-bench"), "spec-bench does not ship"),
        (("--dataset", "gsm8k", "--path", "/no/file"), "'gsm8k' takes no file"),
        (("--dataset", "custom", "--path", "/no/file"), "/no/file cannot be read"),
        (("--output", "/dev/null/file.json"), "/dev/null cannot be made"),
        (("--output", "/"), "/ cannot be written (it is a directory)"),
        (("--temperature", "200"), "temperature=200.0 is not possible"),
    ],
)
def test_files_and_datasets_are_looked_for_before_anything_is_loaded(arguments, cause, monkeypatch):
    monkeypatch.setattr(session_module, "read_bandwidth", lambda *given: pytest.fail("measured"))
    result = run("throughput", "model", *arguments)
    assert result.exit_code == 2
    assert cause in result.stderr


def test_results_are_shown_where_the_file_cannot_be_written(target, tmp_path, monkeypatch):
    def refuse(path, value):
        raise ConfigError(f"{path} cannot be written", "make room")

    monkeypatch.setattr(documents, "write_json", refuse)
    result = run("latency", target, *SMALL, "--num-iters", "1", "--output", str(tmp_path / "kept"))
    assert result.exit_code == 2
    assert "decode step, median ms" in result.stdout
    assert "cannot be written. Make room" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("latency", "--num-iters", "0"),
        ("throughput", "--num-prompts", "0"),
        ("latency", "--num-prompts", "3"),
        ("latency", "nowhere-at-all"),
        ("throughput", "--warmup", "-1"),
    ],
)
def test_wrong_use_exits_with_2(arguments, monkeypatch):
    monkeypatch.setattr(session_module, "read_bandwidth", lambda device: Bandwidth(1e9, "a guess"))
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_repeats_traces_and_the_file_are_kept(target, tmp_path):
    output = tmp_path / "kept" / "run.json"
    arguments = ("--num-prompts", "2", "--repeats", "3", "--trace", "2", "--output", str(output))
    result = run("throughput", target, *SMALL, *arguments)
    assert result.exit_code == 0, result.output
    (numbers,) = json.loads(output.read_text())["results"]
    assert [one["num_tokens"] for one in numbers["runs"]] == [12, 12, 12]
    assert numbers["num_tokens"] == 36
    assert len(numbers["timeline"]) == 6
    assert [len(trace["token_ids"]) for trace in numbers["traces"]] == [6, 6]


def test_prompts_come_from_one_place(target, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("[1, 2, 3]")
    result = run("latency", target, *SMALL, "--prompts", str(path), "--dataset", "gsm8k")
    assert result.exit_code == 2
    assert "Give one of them" in result.stderr


def test_real_acceptance_is_put_into_words(target):
    result = run("latency", target, *SMALL, "--speculative-config", json.dumps(NGRAM))
    assert result.exit_code == 0, result.output
    assert "acceptance at 1 at once: " in result.stdout
    result = run("latency", target, *SMALL, "--speculative-config", json.dumps(SYNTHETIC))
    assert "acceptance at" not in result.stdout


COUNTED = Memory(
    model="a/model",
    dtype="bfloat16",
    method="ngram",
    block_size=64,
    max_model_len=1000,
    max_num_seqs=8,
    weights=18 * 10**9,
    draft_weights=0,
    num_kept_states=9,
    kept_states=760_000_000,
    request=RequestMemory(64, 32_768, 51_000_000, pending=25_000_000),
    swap=SwapLimits(4 * 2**30, 0),
    max_num_batched_tokens=2048,
    step=3 * 2**30,
)


def test_a_state_per_draft_is_shown_beside_what_is_kept():
    lines = memory_report(COUNTED).splitlines()
    assert lines[0] == "a/model, bfloat16, ngram, 64 drafts: counted, nothing is loaded"
    values = {line[: line.rindex("  ")].strip(): line.split()[-2:] for line in lines[1:]}
    assert values["pending inputs of 64 drafts, per request"] == ["23.8", "MiB"]
    assert values["(one recurrent state per draft would take)"] == ["3.0", "GiB"]
    assert values["KV per block of 64 tokens"] == ["2.0", "MiB"]
    assert values["of which speculation adds"] == ["25.8", "MiB"]
    assert values["host memory for swapped KV, at most"] == ["4.0", "GiB"]
    assert values["a step of 2048 rows, while it runs"] == ["3.0", "GiB"]
    assert "disk" not in memory_report(COUNTED)
    assert values["a kept state, for prefix caching"] == ["72.5", "MiB"]
    assert values["9 of them, of the KV memory"] == ["724.8", "MiB"]


def test_the_command_prints_lines_or_one_object(tmp_path):
    write_config(tmp_path)
    arguments = ["bench", "memory", str(tmp_path), "--max-num-seqs", "2", "--block-size", "16"]
    shown = invoke(*arguments)
    assert shown.exit_code == 0, shown.output
    assert "no speculation" in shown.stdout
    assert "recurrent" not in shown.stdout
    spec = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    found = invoke(*arguments, "--json", "--speculative-config", spec)
    value = json.loads(found.stdout)
    assert value["request"]["kv_per_token"] == 2 * 4 * 1 * 8 * 4
    assert value["speculation_per_request"] == 4 * value["request"]["kv_per_token"]
    assert value["total"] == value["weights"] + 2 * value["per_request"]
    assert invoke("bench", "memory", "nowhere").exit_code == 2

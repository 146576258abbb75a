"""``benchmarks/under_load/drive.py``: its requests, floors and tables, and a dry run on a CPU."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import LLAMA
from helpers.scripts import imported
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine

PARTS = ("drive", "workloads", "configs", "engines", "floor", "machine", "report")
# Of sizes that no kernel pads.
SIZES = LLAMA | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
SMALL = {
    "--device": ("cpu",),
    "--max-num-seqs": (3,),
    "--max-model-len": (256,),
    "--kv-gib": (0.01,),
    "--input-len": (70,),
    "--output-len": (8,),
    "--mixed-input": (4, 40),
    "--mixed-output": (2, 12),
    "--long-output": (3,),
    "--crowd": (2,),
    "--machine-rows": (8,),
}
LOADS = ["burst:2", "mixed:5", "long:2x100", "asked", "ngram-never", "ngram-repeat:1"]


@pytest.fixture(scope="module")
def bench():
    with imported("under_load", *PARTS) as modules:
        yield modules
    # The script freezes what it finds, in a process of its own. What was collected is frozen
    # again: without that each full search for garbage in this process takes seconds.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def requests_of(bench, workload: str, repeat: int = 0, vocab_size: int = 151936):
    (load, *_) = bench.workloads.loads_of(workload, bench.workloads.Sizes())
    return bench.workloads.requests_of(load, bench.workloads.Sizes(), vocab_size, repeat)


def lengths_of(requests) -> list[tuple[int, int]]:
    return [(len(one.prompt), one.output_len) for one in requests]


def qwen3_8b(bench):
    layers = 36 * (6144 * 4096 + 4096 * 4096 + 24576 * 4096 + 4096 * 12288)
    head = 151936 * 4096
    return bench.floor.Costs(
        layers, head, attention=2 * 36 * 32 * 128, weights=2 * (layers + head), kv=147456
    )


@pytest.mark.parametrize("workload", ["mixed:384", "burst:8", "ngram-never", "ngram-repeat"])
def test_requests_are_a_function_of_their_names(bench, workload):
    first = requests_of(bench, workload)
    assert requests_of(bench, workload) == first
    others = requests_of(bench, workload, repeat=1)
    assert {one.prompt for one in first}.isdisjoint(one.prompt for one in others)
    assert {one.request_id for one in first}.isdisjoint(one.request_id for one in others)


def test_the_mix_is_what_it_is_said_to_be(bench):
    prompts, outputs = zip(*lengths_of(requests_of(bench, "mixed:384")), strict=True)
    assert (min(prompts) >= 32, max(prompts) <= 1024) == (True, True)
    assert (min(outputs) >= 16, max(outputs) <= 384) == (True, True)
    assert (sum(prompts), sum(outputs)) == (199315, 76538)


def test_prompts_repeat_always_or_never(bench):
    never, again = requests_of(bench, "ngram-never"), requests_of(bench, "ngram-repeat")
    assert all(len(set(one.prompt)) == len(one.prompt) == 512 for one in never)
    assert all(one.prompt[:64] == one.prompt[64:128] for one in again)


def test_a_quarter_of_a_crowd_asks_or_all_of_it(bench):
    sizes = bench.workloads.Sizes()
    loads = {one.name: one for one in bench.workloads.loads_of("asked", sizes)}
    assert len(loads) == 1 + 2 * len(bench.workloads.option_values(500))

    def asking(name: str, what: str) -> int:
        requests = bench.workloads.requests_of(loads[name], sizes, 151936, 0)
        assert len(requests) == 64
        return sum(what in one.sampling for one in requests)

    assert asking("asked: nothing, 0 of 64", "temperature") == 0
    assert asking("asked: temperature, 16 of 64", "temperature") == 16
    assert asking("asked: logprobs, 16 of 64", "logprobs") == 16
    assert asking("asked: logprobs, 16 of 64", "temperature") == 64
    assert asking("asked: grammar, 64 of 64", "grammar") == 64


@pytest.mark.parametrize("name", ["burst", "burst:x", "twice:3", "asked:4"])
def test_unknown_workloads_are_refused(bench, name):
    with pytest.raises(ValueError, match=r"invalid literal|no workload"):
        bench.workloads.loads_of(name, bench.workloads.Sizes())


def test_the_floor_of_one_request(bench):
    costs = bench.floor.Costs(layers=1000, head=100, attention=10, weights=4000, kv=50, recurrent=7)
    rates = bench.floor.Rates(products=1e6, read=1e6, copy=1e5)
    found = bench.floor.floor_of([(20, 3)], costs, rates, bench.floor.Window(), 4)
    prompt, decode = 2 * (20 * 1000 + 100) / 1e6, 2 * 1100 / 1e6
    copies = [(50 * at + 7) / 1e5 for at in (21, 22)]
    assert found.work == pytest.approx(prompt + 2 * decode + sum(copies))
    # A row's products take 2.2 ms, and the weights are read in 4.
    assert found.wall == pytest.approx(prompt + 2 * 4000 / 1e6 + sum(copies))
    assert found.first_token == pytest.approx(prompt)
    assert found.step == pytest.approx(4000 / 1e6 + (50 * 21.5 + 7) / 1e5)
    assert found.attention == pytest.approx(2 * 10 * (20 * 21 / 2) / 1e6)


def test_a_window_costs_its_rows_and_its_drafts(bench):
    drafting = {"fusion": 30, "draft_layers": 200, "draft_head": 40, "k": 3}
    costs = bench.floor.Costs(1000, 100, 0, weights=0, kv=0, **drafting)
    rates = bench.floor.Rates(1.0, 1.0, 1.0)
    window = bench.floor.Window(rows=4, tokens=2.5)
    chain = 2 * 200 + 3 * 40
    prompt = 10 * (1000 + 230) + 100 + chain
    one_window = 4 * 1100 + 2.5 * 230 + chain
    # Five tokens after the first are two windows; a sixth is 0.4 of one more.
    two = bench.floor.floor_of([(10, 6)], costs, rates, window, 1)
    more = bench.floor.floor_of([(10, 7)], costs, rates, window, 1)
    assert two.work == pytest.approx(2 * (prompt + 2 * one_window))
    assert more.work - two.work == pytest.approx(2 * 0.4 * one_window)


def test_the_floor_of_the_mix_on_an_h200(bench):
    lengths = lengths_of(requests_of(bench, "mixed:384"))
    rates = bench.floor.Rates(products=620e12, read=4.62e12, copy=4.24e12)
    found = bench.floor.floor_of(lengths, qwen3_8b(bench), rates, bench.floor.Window(), 256)
    assert found.work == pytest.approx(8.08, abs=0.01)
    # The last steps have few rows, and read the weights all the same.
    assert found.wall == pytest.approx(8.69, abs=0.01)
    assert (found.first_token, found.step) == (None, None)


def write_models(directory: Path) -> Path:
    (directory / "qwen3-8b").mkdir(parents=True)
    (directory / "qwen3-8b" / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    return directory


def run(bench, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["drive.py", *arguments])
    return bench.drive.main()


def test_every_workload_runs_and_is_reported(bench, monkeypatch, tmp_path, capsys):
    models, out = write_models(tmp_path / "models"), tmp_path / "out"
    small = [str(one) for name, values in SMALL.items() for one in (name, *values)]
    common = [*small, "--models", str(models)]
    assert run(bench, monkeypatch, *common, "--machine", "--out", str(out / "machine.json")) == 0
    for config in ("plain", "ngram5"):
        arguments = ["--config", config, "--repeat", "2", "--workloads", *LOADS]
        file = str(out / f"{config}.json")
        assert run(bench, monkeypatch, *common, *arguments, "--out", file) == 0
    records, machine = bench.report.read([out])
    assert set(records) == {("sametoken", "plain"), ("sametoken", "ngram5")}
    assert machine["products"]["qwen3-8b"] > 0

    for record in records.values():
        assert record["failed"] == []
        grammars = [one["load"] for one in record["skipped"]]
        assert grammars == ["asked: grammar, 1 of 2", "asked: grammar, 2 of 2"]
        # Each load once and again.
        assert len(record["results"]) == 2 * (5 + 1 + 2 * 6)
        for result in record["results"]:
            assert result["tokens"] == sum(output for _, output in result["lengths"])
            assert 0 < result["ttft_mean_ms"] <= result["ttft_max_ms"] <= 1e3 * result["wall_s"]
    again = [
        one for one in records["sametoken", "ngram5"]["results"] if "repeat" in one["workload"]
    ]
    assert all(0 < one["accepted"] <= one["drafts"] for one in again)
    text = bench.report.report(records, machine)
    for expected in (
        "## plain",
        "| burst:2 |",
        "sametoken: ngram-never",
        "grammar, 1 of 2 skipped",
    ):
        assert expected in text
    assert "tokens/s in" in capsys.readouterr().out


def canned(engine: str, rate: float, step: float) -> dict:
    result = {
        "workload": "burst:2",
        "load": "burst:2",
        "repeat": 0,
        "note": "",
        "asked": "",
        "lengths": [[4, 3], [4, 3]],
        "wall_s": 6 / rate,
        "tokens_per_second": rate,
        "step_ms": step,
        "ttft_mean_ms": 8.0,
        "ttft_max_ms": 9.0,
        "windows": 4,
        "drafts": 0,
        "accepted": 0,
        "tokens_per_window": 1.0,
    }
    facts = {"layers": 100, "head": 10, "attention": 1, "weights": 220, "kv": 1, "recurrent": 0}
    facts |= {"fusion": 0, "draft_layers": 0, "draft_head": 0, "k": 0, "synthetic_rates": None}
    return {
        "engine": engine,
        "config": "plain",
        "model": "m",
        "options": {"max_num_seqs": 2},
        "facts": facts,
        "results": [result],
        "skipped": [],
        "failed": [{"load": "mixed:9", "why": "ValueError('no')"}] if engine == "vllm" else [],
    }


def test_the_report_of_known_numbers(bench):
    machine = {
        "device": "H200",
        "torch": "2",
        "rows": 4096,
        "products": {"m": 2e5},
        "read": 1e6,
        "read_by": "sum",
        "copy": 1e12,
    }
    records = {
        ("sametoken", "plain"): canned("sametoken", 300.0, 4.0),
        ("vllm", "plain"): canned("vllm", 200.0, 5.0),
    }
    text = bench.report.report(records, machine)
    cells = "| burst:2 | 200 | 300 | 1.50 | 5.00 | 4.00 | 1.25 | 8 | 8 | 1.00 | 9 | 9 | 1.00 |"
    assert cells in text
    assert "- vllm, plain: mixed:9 FAILED: ValueError('no')" in text
    # 8 rows of prompts and 2 of logits, then two steps of 2 rows: 2 * (820 + 440) / 2e5.
    assert "| burst:2 | 0.01 | 0.01 | 0.01 | 0.02 | 1.59 | 1.59 |" in text
    assert bench.report.report(records, None).count("floor") == 0


def test_products_are_of_the_matrices_that_a_row_meets(bench, tmp_path):
    model = write_models(tmp_path) / "qwen3-8b"
    shapes = bench.machine.weight_shapes(model)
    options = {"model": str(model), "load_format": "dummy", "device": "cpu", "num_kv_blocks": 16}
    core = build_engine(EngineConfig.from_options(**options, skip_tokenizer_init=True))
    target = bench.engines.target_pass(core.resolved)
    assert sum(n * k * count for (n, k), count in shapes.items()) == target.layers + target.head
    assert target.head == SIZES["vocab_size"] * SIZES["hidden_size"]
    heads = SIZES["num_attention_heads"] * SIZES["head_dim"]
    assert target.attention == 2 * SIZES["num_hidden_layers"] * heads


def test_a_turned_head_says_the_next_id_and_is_turned_back(bench):
    engine = bench.engines.Sametoken.__new__(bench.engines.Sametoken)
    head = torch.arange(12.0).view(4, 3)
    engine._head = SimpleNamespace(matrix=head.clone())
    with engine.without_repeats() as note:
        assert "turned" in note
        assert torch.equal(engine._head.matrix[1], head[0])
    assert torch.equal(engine._head.matrix, head)
    engine._head = object()
    with engine.without_repeats() as note:
        assert "outputs repeat" in note

"""``sametoken bench memory``: lines for people, one object for programs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from helpers.checkpoints import LLAMA
from sametoken.bench.memory import Memory
from sametoken.cli.main import app
from sametoken.cli.report import in_units, memory_report
from sametoken.engine.resolve import RequestMemory

HYBRID = Memory(
    model="a/model",
    dtype="bfloat16",
    method="ngram",
    block_size=64,
    max_model_len=1000,
    max_num_seqs=8,
    weights=18 * 10**9,
    draft_weights=0,
    request=RequestMemory(64, 32_768, 51_000_000, 25_000_000),
)


def test_a_state_per_draft_is_shown_beside_what_is_kept():
    lines = memory_report(HYBRID).splitlines()
    assert lines[0] == "a/model, bfloat16, ngram, 64 drafts: counted, nothing is loaded"
    values = {line[: line.rindex("  ")].strip(): line.split()[-2:] for line in lines[1:]}
    assert values["pending inputs of 64 drafts, per request"] == ["25.0", "MB"]
    assert values["(a recurrent state per draft would take)"] == ["3.3", "GB"]
    assert values["KV per block of 64 tokens"] == ["2.1", "MB"]
    assert values["of which speculation adds"] == ["27.1", "MB"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (25_362_432, "25.4 MB"), (3 * 10**9, "3.0 GB")],
)
def test_units(num_bytes, text):
    assert in_units(num_bytes) == text


def test_the_command_prints_lines_or_one_object(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["bench", "memory", str(tmp_path), "--max-num-seqs", "2", "--block-size", "16"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "no speculation" in shown.stdout
    assert "recurrent" not in shown.stdout
    spec = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    found = CliRunner().invoke(app, [*arguments, "--json", "--speculative-config", spec])
    value = json.loads(found.stdout)
    assert value["request"]["kv_per_token"] == 2 * 4 * 1 * 8 * 4
    assert value["speculation_per_request"] == 4 * value["request"]["kv_per_token"]
    assert value["total"] == value["weights"] + 2 * value["per_request"]
    assert CliRunner().invoke(app, ["bench", "memory", "nowhere"]).exit_code == 2

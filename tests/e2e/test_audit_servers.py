"""Two of our own servers under audit: clean, with a planted defect, and merely noisy."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from helpers.chat_model import write_chat_model
from helpers.commands import run_command
from helpers.http_server import running_server
from helpers.hub import cache_snapshot
from helpers.serving import build_corrupt, build_noisy
from sametoken.audit.asks import AuditRequest
from sametoken.audit.compare import CORRUPTION
from sametoken.audit.server_audit import audit_sides, server_side
from sametoken.audit.servers import Server
from sametoken.audit.verdict import CORRUPTED, IDENTICAL, NONDETERMINISTIC, OTHER_MODEL, UNSTEADY
from sametoken.cli.main import app

NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}
TEXTS = ("the cat in the hat in the cat in the", "a a a b a a a b", "in there, in the end")
ASKS = [
    AuditRequest(f"{seed}@{temperature}", (), text, temperature, seed, 32)
    for temperature in (0.0, 0.8)
    for seed, text in enumerate(TEXTS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def plain(model):
    with running_server(model) as server:
        yield server.url


#: Enough that noise moves a token of some, and by chance alone never makes corruption.
SAMPLED_ASKS = [
    AuditRequest(f"more {seed}", (), TEXTS[seed % 3], 0.8, seed, 32) for seed in range(3, 18)
]


def audit(subject: str, baseline: str, asks=ASKS):
    return audit_sides(
        server_side(Server(subject), 3), server_side(Server(baseline + "/v1"), 3), asks
    )


@pytest.fixture(scope="module")
def drafting(model):
    with running_server(model, engine=NGRAM) as server:
        yield server.url


def test_a_clean_server_is_identical(plain, drafting):
    verdict = audit(drafting, plain)
    assert verdict.summary == IDENTICAL
    profile = verdict.diagnosis.profiles["running"]
    assert profile.num_first > 10
    asked = ["audit", "--url", drafting, "--baseline-url", plain, "--json"]
    asked += ["--limit", "2", "--max-tokens", "8", "--dataset", "random"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["identical"]
    assert found["comparisons"][0]["num_requests"] == 4


def test_an_audit_of_servers_loads_no_tensors(model, plain, drafting):
    """Seconds and hundreds of megabytes that a client of HTTP has no use for."""
    asked = ["audit", "--url", drafting, "--baseline-url", plain]
    asked += ["--limit", "2", "--max-tokens", "8", "--dataset", "random"]
    shown, loaded = run_command([*asked, str(model)], ("torch", "triton", "xgrammar"))
    assert loaded == []
    assert IDENTICAL in shown


def test_an_audit_of_servers_needs_no_weights(model, plain, drafting, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    small = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix == ".json"}
    cache_snapshot(tmp_path, "tiny/chat", small)
    asked = ["audit", "tiny/chat", "--url", drafting, "--baseline-url", plain]
    result = CliRunner().invoke(app, [*asked, "--limit", "1", "--max-tokens", "4"])
    assert result.exit_code == 0, result.output
    assert IDENTICAL in result.stdout


def test_a_planted_defect_is_corruption(model, plain):
    with running_server(model, engine=NGRAM, build=build_corrupt) as server:
        verdict = audit(server.url, plain)
    assert verdict.summary == CORRUPTED
    assert not verdict.repeats[0].divergences
    assert any(d.kind == CORRUPTION for d in verdict.comparisons[0].divergences)


def test_a_side_that_is_merely_nondeterministic_is_named(model, plain):
    with running_server(model, build=build_noisy) as server:
        as_subject = audit(server.url, plain, ASKS + SAMPLED_ASKS)
        as_baseline = audit(plain, server.url, ASKS + SAMPLED_ASKS)
    assert not as_subject.identical
    assert as_subject.summary == UNSTEADY
    assert not as_baseline.identical
    assert as_baseline.summary == NONDETERMINISTIC


def test_our_engine_is_a_baseline(model, drafting):
    asked = ["audit", str(model), "--url", drafting, "--json", "--device", "cpu"]
    asked += ["--limit", "2", "--max-tokens", "8", "--dtype", "float32", "--num-kv-blocks", "300"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["summary"] == IDENTICAL


def test_a_server_of_another_model_is_not_called_corrupted(tmp_path, drafting):
    other = write_chat_model(tmp_path, seed=1)
    asked = ["audit", str(other), "--url", drafting, "--device", "cpu", "--dtype", "float32"]
    asked += ["--limit", "4", "--max-tokens", "8", "--num-kv-blocks", "300"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1, result.output
    assert OTHER_MODEL in result.stdout.splitlines()[0]
    assert "first tokens, which no draft can change, have other" in result.stdout

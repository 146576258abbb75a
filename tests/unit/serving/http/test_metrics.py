from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from helpers.fake_engine import STATS, SUMMARY, FakeEngine
from sametoken.bench.scrape import parse_counters
from sametoken.serving.http.metrics import conditional_acceptance, make_registry
from sametoken.types.outputs import SpeculationMetrics

DASHBOARD = Path(__file__).parents[4] / "docs" / "grafana" / "sametoken.json"
PREFIX = "sametoken:"
#: Names of vLLM, without its prefix, that a user's dashboards and alarms rely on.
VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "cpu_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_params_n_bucket",
    "cache_config_info",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
}


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by name without its prefix, and by label other than the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [v for name, v in sorted(sample.labels.items()) if name != "model_name"]
            found[sample.name.removeprefix(PREFIX), ",".join(labels)] = sample.value
    return found


@pytest.fixture
def scraped(serve) -> dict[tuple[str, str], float]:
    client = serve(FakeEngine("hello", window=2))
    assert client.post("/v1/completions", json={"prompt": "ab"}).status_code == 200
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


def test_names_that_vllm_s_users_know(scraped):
    assert {name for name, _ in scraped} >= VLLM_NAMES


def test_values_are_the_engine_s(scraped):
    expected = {
        ("num_requests_running", ""): 2,
        ("num_requests_waiting", ""): 1,
        ("kv_cache_usage_perc", ""): 0.25,
        ("prompt_tokens_total", ""): 100,
        ("generation_tokens_total", ""): 50,
        ("request_success_total", "stop"): 3,
        ("request_success_total", "length"): 2,
        ("request_success_total", "abort"): 0,
        ("request_success_total", "error"): 0,
        ("requests_refused_total", ""): 1,
        ("wasted_rows_total", ""): 7,
        ("spec_decode_num_steps_total", ""): 10,
        ("spec_decode_num_drafts_total", ""): 8,
        ("spec_decode_num_draft_tokens_total", ""): 16,
        ("spec_decode_num_accepted_tokens_total", ""): 9,
        ("spec_decode_num_accepted_tokens_per_pos_total", "0"): 6,
        ("spec_decode_num_accepted_tokens_per_pos_total", "1"): 3,
        ("spec_decode_num_draft_tokens_per_pos_total", "2"): 2,
        ("spec_decode_conditional_acceptance", "1"): 0.5,
        ("step_time_seconds_bucket", "0.001"): 3,
        ("step_time_seconds_count", ""): 3,
        ("shadow_audit_differences_total", ""): 0,
        ("cache_config_info", "16,99"): 1,
    }
    assert {key: scraped[key] for key in expected} == expected


def test_the_acceptance_length_of_a_benchmark_is_the_server_s_own(serve):
    text = serve().get("/metrics").text
    length = samples(text)["spec_decode_acceptance_length", ""]
    assert parse_counters(text).speculation()["acceptance_length"] == length == 1.9


def test_times_of_requests(scraped):
    """Of the one request: 6 tokens in 3 steps, 10 ms apart."""
    assert scraped["time_to_first_token_seconds_count", ""] == 1
    assert scraped["time_to_first_token_seconds_sum", ""] == pytest.approx(0.01)
    assert scraped["e2e_request_latency_seconds_sum", ""] == pytest.approx(0.03)
    assert scraped["request_queue_time_seconds_sum", ""] == pytest.approx(0.004)
    assert scraped["request_prefill_time_seconds_sum", ""] == pytest.approx(0.006)
    assert scraped["request_decode_time_seconds_sum", ""] == pytest.approx(0.02)
    assert scraped["request_inference_time_seconds_sum", ""] == pytest.approx(0.026)
    assert scraped["request_time_per_output_token_seconds_sum", ""] == pytest.approx(0.02 / 5)
    assert scraped["inter_token_latency_seconds_count", ""] == 1
    assert scraped["inter_token_latency_seconds_sum", ""] == pytest.approx(0.02 / 5)
    assert scraped["request_prompt_tokens_sum", ""] == 2
    assert scraped["request_generation_tokens_sum", ""] == 6


def test_the_longest_completion_of_a_request(serve):
    """A completion says its index: b, bcd and bcdef, each with the end of the text."""
    client = serve(FakeEngine(lambda text, index: "bcdef"[: 2 * index + 1]))
    assert client.post("/v1/completions", json={"prompt": "ab", "n": 3}).status_code == 200
    scraped = samples(client.get("/metrics").text)
    assert scraped["request_generation_tokens_sum", ""] == 12
    assert scraped["request_max_num_generation_tokens_sum", ""] == 6
    assert scraped["request_params_n_sum", ""] == 3


def test_times_of_a_stream(serve):
    """As above, read step by step: two gaps of two tokens each."""
    client = serve(FakeEngine("hello", window=2))
    assert client.post("/v1/completions", json={"prompt": "ab", "stream": True}).status_code == 200
    scraped = samples(client.get("/metrics").text)
    assert scraped["inter_token_latency_seconds_count", ""] == 2
    assert scraped["request_generation_tokens_sum", ""] == 6


def test_no_speculation_yet():
    stats = replace(STATS, speculation=SpeculationMetrics())
    registry = make_registry(lambda: stats, SUMMARY, "toy")
    found = samples(generate_latest(registry).decode())
    assert found["spec_decode_num_drafts_total", ""] == 0
    assert not [key for key in found if key[0].endswith("per_pos_total")]


def test_conditional_acceptance():
    assert conditional_acceptance((8, 6, 2), (6, 3, 0)) == [0.75, 0.5, 0.0]
    assert conditional_acceptance((), ()) == []
    assert conditional_acceptance((4, 4), (0, 0)) == [0.0, 0.0]


def expressions(node) -> list[str]:
    if isinstance(node, dict):
        own = [node["expr"]] if "expr" in node else []
        return own + [found for value in node.values() for found in expressions(value)]
    if isinstance(node, list):
        return [found for value in node for found in expressions(value)]
    return []


def test_every_metric_of_the_dashboard_exists(scraped):
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    exprs = expressions(dashboard)
    assert len(exprs) >= 10
    known = {PREFIX + name for name, _ in scraped}
    for expr in exprs:
        names = re.findall(rf"{PREFIX}\w+", expr)
        assert names, expr
        assert set(names) <= known, expr


def test_the_dashboard_is_one_that_grafana_takes():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(places)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
    assert dashboard["schemaVersion"] >= 36
    assert dashboard["uid"] == "sametoken"

"""What a server says of itself: one error or no traceback, whatever it says."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from sametoken.bench import serving
from sametoken.bench.openai_stream import Load
from sametoken.bench.serving import bench_serving
from sametoken.bench.workload import Server, ServingWorkload
from sametoken.errors import ConfigError

MODELS = json.dumps({"data": [{"id": "m"}]})
ANSWER = 'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


def measure(monkeypatch, models=MODELS, metrics="", **server):
    """The document of one request to a server that answers so."""
    texts = {"/v1/models": models, "/metrics": metrics, "/v1/completions": ANSWER}

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=texts[request.url.path])

    def open_client(server: Server) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url=server.url)

    monkeypatch.setattr(serving, "open_client", open_client)
    workload = ServingWorkload(dataset="random", num_prompts=1, warmup=0, trace=0)
    return asyncio.run(bench_serving(Server(**server), workload, [Load()], ()))


@pytest.mark.parametrize(
    "models",
    ['{"data": ' + "[" * 5000 + "]" * 5000 + "}", '{"data": []}', '{"data": "m"}', "[]", "{"],
)
def test_a_list_of_models_in_another_form_is_one_error(monkeypatch, models):
    with pytest.raises(ConfigError, match="lists no models"):
        measure(monkeypatch, models, model="m")


def test_the_models_are_told_in_words(monkeypatch):
    with pytest.raises(ConfigError, match=r"does not serve .other.\. Use .m.$"):
        measure(monkeypatch, model="other")


@pytest.mark.parametrize(
    ("k", "asked"), [("three", None), ("3", {"method": "ngram", "num_speculative_tokens": 3})]
)
def test_a_number_of_drafts_that_is_no_number_is_left_out(monkeypatch, k, asked):
    name = "sametoken:engine_info"
    labels = f'{{method="ngram",num_speculative_tokens="{k}"}}'
    document = measure(monkeypatch, metrics=f"# TYPE {name} gauge\n{name}{labels} 1.0\n")
    assert document["settings"]["asked"]["speculative_config"] == asked
    assert document["results"][0]["num_requests"] == 1

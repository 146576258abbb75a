from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import sametoken
from helpers.fake_engine import STATS, SUMMARY, FakeEngine
from helpers.http_server import running_app
from sametoken.errors import EngineRestartingError
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.stats import AuditDifference, AuditStats
from sametoken.types.lora_modules import parse_modules


def test_models(serve):
    client = serve(served_model_name=("org/small", "tiny"))
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [
        ("org/small", "org/small"),
        ("tiny", "org/small"),
    ]
    assert client.get("/v1/models/org/small").json() == cards[0]
    assert client.get("/v1/models/").json()["data"] == cards
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert [card["id"] for card in serve().get("/v1/models").json()["data"]] == ["toy"]


ADAPTERS = parse_modules({"sql": "./a", "org/chat": "org/chat-lora"})
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_adapters_are_models_whose_parent_is_the_model(serve):
    client = serve(FakeEngine(adapters=ADAPTERS), served_model_name=("small", "tiny"))
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("small", "small", None),
        ("tiny", "small", None),
        ("sql", "./a", "small"),
        ("org/chat", "org/chat-lora", "small"),
    ]
    assert client.get("/v1/models/org/chat").json() == cards[3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", CHAT | {"max_tokens": 9}),
    ],
)
def test_a_request_names_its_adapter_as_the_model(serve, path, body, stream):
    engine = FakeEngine(adapters=ADAPTERS)
    client = serve(engine)
    for adapter, name in ((None, "toy"), ("sql", "sql"), ("org/chat", "org/chat")):
        engine.chosen.clear()
        answer = client.post(path, json=body | {"model": name, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert set(engine.chosen) == {adapter}
        assert f'"model":"{name}"' in answer.text
    engine.chosen.clear()
    answer = client.post(path, json=body | {"model": "sq", "stream": stream})
    assert (answer.status_code, engine.chosen) == (404, [])
    assert "'sq' does not exist. Use 'toy' or 'sql' or 'org/chat'" in answer.text


def test_tokens_of_an_adapter_are_those_of_the_model(serve):
    client = serve(FakeEngine(adapters=ADAPTERS))
    bodies = {
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": CHAT,
        "/v1/responses/input_tokens": {"input": "hi"},
    }
    for path, body in bodies.items():
        own, of_adapter = (client.post(path, json=body | {"model": n}) for n in ("toy", "sql"))
        assert (own.status_code, own.json()) == (200, of_adapter.json())
        assert client.post(path, json=body | {"model": "none"}).status_code == 404


def test_tokens_there_and_back(serve):
    client = serve()
    found = client.post("/tokenize", json={"prompt": "the é", "return_token_strs": True}).json()
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), SUMMARY.max_model_len)
    assert found["token_strs"][0] == "the"
    back = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": "the é"}
    plain = client.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()
    assert "token_strs" not in plain


def test_requests_of_tokens_may_have_nulls(serve):
    client = serve()
    nulls = dict.fromkeys(("model", "messages", "chat_template", "return_token_strs", "other"))
    found = client.post("/tokenize", json={"prompt": "the é"} | nulls).json()
    assert found == client.post("/tokenize", json={"prompt": "the é"}).json()
    body = {"tokens": found["tokens"], "model": None, "other": None}
    assert client.post("/detokenize", json=body).json() == {"prompt": "the é"}


def test_tokens_of_a_conversation(serve):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"function": {"name": "add"}}],
        "return_token_strs": True,
    }
    text = "".join(serve().post("/tokenize", json=body).json()["token_strs"])
    assert '"name": "add"' in text
    assert text.endswith("<|im_start|>assistant\n")


def test_tokens_of_a_conversation_are_those_of_its_answer(serve):
    engine = FakeEngine()
    engine.tokenizer.hf.chat_template += "{{ mood }}"
    client = serve(engine)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    body = {"messages": turns, "chat_template_kwargs": {"mood": "calm"}}
    for ends in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        counted = client.post("/tokenize", json=body | ends).json()["tokens"]
        answer = client.post(
            "/v1/chat/completions", json=body | ends | {"return_token_ids": True}
        ).json()
        assert counted == answer["prompt_token_ids"]


BOTH_ENDS = {"add_generation_prompt": True, "continue_final_message": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x", "more": 1}),
        ("/tokenize", {"prompt": "x", "add_special_tokens": None}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]} | BOTH_ENDS),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [SUMMARY.vocab_size]}),
        ("/detokenize", {"tokens": [True]}),
    ],
)
def test_tokens_that_cannot_be(serve, path, body):
    answer = serve().post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models", "/metrics", "/"])
def test_head_is_get_without_the_body(serve, path):
    client = serve()
    whole, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


def test_a_connection_serves_on_after_a_head():
    with running_app(create_app(FakeEngine(), ServerConfig())) as url, httpx.Client() as client:
        for _ in range(2):
            head = client.head(f"{url}/health")
            assert (head.status_code, head.content) == (200, b"")
            assert client.get(f"{url}/health").json()["status"] == "ok"


def test_ids_outside_the_vocabulary_are_named(serve):
    answer = serve().post("/detokenize", json={"tokens": [SUMMARY.vocab_size]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_head_of_what_has_no_get_is_refused(serve):
    assert serve().head("/v1/completions").status_code == 405


def test_head_needs_the_key_that_get_needs(serve):
    client = serve(api_key=("secret",))
    assert client.head("/health").status_code == 200
    assert client.head("/v1/models").status_code == 401


def test_health_and_readiness(serve):
    engine = FakeEngine()
    client = serve(engine)
    difference = AuditDifference("r", 3, served=5, replayed=None)
    audit = AuditStats(num_audited=9, num_mismatched=1, last_difference=difference)
    engine.stats = lambda: type(STATS)(
        **{name: getattr(STATS, name) for name in STATS.__slots__} | {"audit": audit}
    )
    healthy = client.get("/health")
    assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")
    shown = healthy.json()["detail"]["shadow_audit"]
    assert (shown["audited"], shown["differences"]) == (9, 1)
    assert shown["last_difference"] == {
        "request_id": "r",
        "position": 3,
        "served": 5,
        "replayed": None,
    }
    assert client.get("/ready").status_code == 200
    engine.is_ready = False
    states = [(client.get(path).status_code, client.get(path).json()["status"]) for path in PATHS]
    assert states == [(200, "draining"), (503, "draining")]
    engine.errored = EngineRestartingError("it died", "wait")
    states = [(client.get(path).status_code, client.get(path).json()["status"]) for path in PATHS]
    assert states == [(503, "down"), (503, "down")]
    assert client.get("/health").json()["detail"]["cause"] == "engine_restarting"


PATHS = ("/health", "/ready")


def test_version_and_page(serve):
    client = serve()
    assert client.get("/version").json() == {"version": sametoken.__version__}
    for path in ("/", "/docs"):
        page = client.get(path)
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; connect-src 'self';")
        assert "script-src 'self';" in policy
        loaded = re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page.text)
        assert all(client.get(f"/{name}").status_code == 200 for name in loaded)
        assert not re.search(r"(src|href)=.?(https?:|//)|<script>|<style>", page.text)


def test_the_document_promises_nothing_that_is_not_kept(serve):
    document = serve().get("/openapi.json").json()
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert len(operations) == 15
    assert not any("422" in operation["responses"] for operation in operations)
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert all(operation["description"] for operation in operations)


def test_the_page_on_the_server_has_every_path(serve):
    """``test_rollouts.py`` has those of trainers."""
    page = (Path(__file__).parents[4] / "docs" / "server.md").read_text(encoding="utf-8")
    table = page.partition("## Endpoints")[2].partition("##")[0]
    named = {re.sub(r"{\w+}", "{}", path) for path in re.findall(r"`(/[^`]*)`", table)}
    document = serve(allow_runtime_lora_updating=True).get("/openapi.json").json()
    assert {re.sub(r"{\w+}", "{}", path) for path in document["paths"]} <= named

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest

from helpers.cli import invoke
from sametoken.cli import serve as command
from sametoken.serving.http import run as run_module
from sametoken.serving.ray import serve
from sametoken.serving.ray.config import RayConfig

USAGE = 2
INTERRUPTED = 130
run_model = partial(invoke, "serve", "model", "--port", "0")
run_toy = partial(invoke, "serve", "toy")


def test_options_reach_engine_limits_and_server(started):
    speculation = '{"method": "ngram", "num_speculative_tokens": 8}'
    result = run_model(
        *("--speculative-config", speculation, "--max-model-len", "64", "--seed", "5"),
        *("--max-waiting", "3", "--shadow-audit-rate", "0.5", "--drain-timeout", "2.5"),
        *("--api-key", "a", "--api-key", "b", "--served-model-name", "tiny", "--rate-limit", "9"),
    )
    assert result.exit_code == 0, result.output
    ((engine, limits, server, listener),) = started
    assert (engine.model, engine.max_model_len, engine.seed) == ("model", 64, 5)
    assert engine.speculative_config.num_speculative_tokens == 8
    assert (limits.max_waiting, limits.shadow_audit_rate) == (3, 0.5)
    assert (server.api_key, server.served_model_name) == (("a", "b"), ("tiny",))
    assert (server.rate_limit, server.drain_timeout) == (9, 2.5)
    assert listener.fileno() == -1, "the socket is left open"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("m", "--served-model-name", "a", "b", "--seed", "5"), ("a", "b")),
        (("--served-model-name", "a", "b", "c", "--seed", "5", "--model", "m"), ("a", "b", "c")),
        (("m", "--seed", "5", "--served-model-name", "a", "--served-model-name", "b"), ("a", "b")),
        (("--seed", "5", "--served-model-name", "a", "m"), ("a",)),
        (("m", "--served-model-name=a", "--seed", "5"), ("a",)),
    ],
)
def test_several_names_may_follow_one_flag(started, arguments, names):
    result = invoke("serve", *arguments, "--port", "0")
    assert result.exit_code == 0, result.output
    ((engine, _, server, _),) = started
    assert (engine.model, engine.seed, server.served_model_name) == ("m", 5, names)


@pytest.mark.parametrize(
    "words",
    [
        ("--lora-modules", "sql=./a", "chat=org/b", "--seed", "5"),
        ("--lora-modules=sql=./a", "--lora-modules", "chat=org/b"),
        ("--lora-modules", '{"name": "sql", "path": "./a"}', '{"name": "chat", "path": "org/b"}'),
        ("--enable-lora", "--max-loras", "2", "--lora-modules", "sql=./a", "chat=org/b"),
    ],
)
def test_adapters_are_named_in_vllm_s_forms(started, words):
    result = run_model(*words)
    assert result.exit_code == 0, result.output
    ((engine, *_),) = started
    assert engine.lora_modules == (("sql", "./a"), ("chat", "org/b"))


def test_an_adapter_has_no_name_of_the_model(started):
    refused = run_model("--lora-modules", "model=./a")
    assert "lora_modules has 'model', which is a name of the model" in refused.stderr
    again = run_model("--served-model-name", "b", "--lora-modules", "model=./a")
    assert (refused.exit_code, again.exit_code, len(started)) == (USAGE, 0, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--allowed-origins", "http://a.example", "--allowed-origins", "http://b.example"),
        ("--allowed-origins", '["http://a.example", "http://b.example"]'),
    ],
)
def test_origins_may_stand_in_a_list_in_json(started, arguments):
    result = run_model(*arguments)
    assert result.exit_code == 0, result.output
    ((_, _, server, _),) = started
    assert server.allowed_origins == ("http://a.example", "http://b.example")


def test_the_key_may_stand_in_a_variable(started, monkeypatch):
    monkeypatch.setenv(command.API_KEY_VARIABLE, "secret")
    run_model()
    run_model("--api-key", "other")
    assert [server.api_key for _, _, server, _ in started] == [("secret",), ("other",)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--log-level", "loud"),
        ("--shadow-audit-rate", "2"),
        ("--speculative-config", "{}"),
        ("--lora-modules", "sql"),
        ("--no-such-option",),
        ("--allowed-origins", '["*"'),
    ],
)
def test_what_is_impossible_is_a_usage_error(started, arguments):
    result = run_model(*arguments)
    assert (result.exit_code, started) == (USAGE, [])


def test_an_interrupted_server(monkeypatch):
    monkeypatch.setattr(run_module, "run", lambda *given: True)
    assert run_model().exit_code == INTERRUPTED


def test_options_of_ray_need_ray():
    done = run_toy("--replicas", "2")
    assert (done.exit_code, "Add --ray" in done.output) == (2, True)


@pytest.mark.parametrize(
    "option",
    [("--allow-runtime-lora-updating",), ("--weight-transfer-config", '{"backend": "gloo"}')],
)
def test_what_changes_one_engine_is_refused_with_ray(option):
    done = run_toy("--ray", *option)
    assert (done.exit_code, "other weights or lora_modules" in done.output) == (2, True)


def test_without_the_extra_ray_is_unsupported(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    done = run_toy("--ray")
    assert (done.exit_code, "sametoken[ray]" in done.output) == (3, True)


@pytest.mark.parametrize(("interrupted", "exit_code"), [(False, 0), (True, 130)])
def test_options_reach_the_deployment(monkeypatch, interrupted, exit_code):
    given = []

    def note(*options) -> bool:
        given.extend(options)
        return interrupted

    monkeypatch.setattr(serve, "run", note)
    words = (
        "--ray --ray-min-replicas 2 --ray-max-replicas 5 --port 99 --max-waiting 7 --dtype float32"
    )
    assert run_toy(*words.split()).exit_code == exit_code
    engine, limits, server, ray_config = given
    assert (engine.model, engine.dtype) == ("toy", "float32")
    assert (limits.max_waiting, server.port) == (7, 99)
    assert ray_config == replace(RayConfig(), ray_min_replicas=2, ray_max_replicas=5)

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sametoken.errors import ConfigError
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.http.config import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from sametoken.serving.http.reasoning_parsers import REASONING_FORMS
from sametoken.serving.http.tool_parsers import TOOL_PARSERS
from sametoken.serving.limits import ServingLimits


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"max_request_bytes": 0},
        {"rate_limit": -1},
        {"max_completions": 0},
        {"max_logprobs": 21},
        {"drain_timeout": -1.0},
        {"log_level": "loud"},
        {"tool_call_parser": "telepathy"},
        {"reasoning_parser": "telepathy"},
        {"tool_call_parser": "openai", "reasoning_parser": "none"},
        {"tool_call_parser": "openai", "reasoning_parser": "qwen3"},
        {"tool_call_parser": "hermes", "reasoning_parser": "openai_gptoss"},
        {"structured_outputs_config": "true"},
        {"structured_outputs_config": '{"enable_in_reasoning": 1}'},
        {"structured_outputs_config": '{"disable_any_whitespace": true}'},
        {"api_key": ("",)},
        {"api_key": ("good", " outer")},
        {"api_key": ("in ner",)},
        {"api_key": ("schlüssel",)},
        {"api_key": ("line\n",)},
        {"max_bodies_bytes": 0},
        {"max_bodies_bytes": 2**20},
        {"body_timeout": 0.0},
        {"header_timeout": -1.0},
        {"write_timeout": float("nan")},
        {"max_connections": 0},
        {"served_model_name": ("",)},
        {"allowed_origins": ("",)},
        {"allowed_origins": ("*", "localhost:3000")},
        {"allowed_origins": ("http://localhost:3000/",)},
        {"allowed_origins": ('["*"]',)},
        {"root_path": "api"},
        {"ssl_certfile": "cert.pem"},
        {"ssl_certfile": "/no/cert.pem", "ssl_keyfile": "/no/key.pem"},
    ],
)
def test_what_is_impossible_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


def test_keys_are_not_printed():
    assert "secret" not in repr(ServerConfig(api_key=("secret",)))
    with pytest.raises(ConfigError) as refused:
        ServerConfig(api_key=("a secret",))
    assert "secret" not in str(refused.value)


def test_constraints_wait_for_the_end_of_reasoning_unless_they_are_to_hold_in_it():
    assert not ServerConfig().constrains_reasoning
    given = '{"backend": "xgrammar", "enable_in_reasoning": true}'
    assert ServerConfig(structured_outputs_config=given).constrains_reasoning
    with pytest.raises(ConfigError, match=r"^backend='outlines' is not possible"):
        ServerConfig(structured_outputs_config='{"backend": "outlines"}')


def test_every_parser_that_is_offered_exists():
    assert set(TOOL_CALL_PARSERS) == set(TOOL_PARSERS)
    assert set(REASONING_PARSERS) == set(REASONING_FORMS)


@pytest.mark.parametrize(
    ("options", "by_template", "expected"),
    [
        ({}, None, (None, None)),
        ({}, "hermes", ("hermes", None)),
        ({}, "openai", ("openai", "openai_gptoss")),
        ({"tool_call_parser": "none"}, "openai", (None, None)),
        ({"tool_call_parser": "openai"}, None, ("openai", "openai_gptoss")),
        ({"reasoning_parser": "none"}, "openai", (None, None)),
        ({"reasoning_parser": "qwen3"}, "hermes", ("hermes", "qwen3")),
        ({"reasoning_parser": "openai_gptoss"}, None, ("openai", "openai_gptoss")),
        (
            {"reasoning_parser": "openai_gptoss", "tool_call_parser": "none"},
            "openai",
            (None, "openai_gptoss"),
        ),
    ],
)
def test_harmony_has_parsers_of_both_kinds(options, by_template, expected):
    assert ServerConfig(**options).parsers(by_template) == expected


def test_the_page_on_operation_has_the_limits_that_options_set():
    page = (Path(__file__).parents[4] / "docs" / "operating.md").read_text(encoding="utf-8")
    table = page.partition("## Limits")[2].partition("## ")[0]
    configs = (ServerConfig, ServingLimits, BatchConfig)
    defaults = {one.name: one.default for config in configs for one in fields(config)}
    defaults["rate_limit"] = "any"
    found = [
        (limit, defaults[name.replace("-", "_")])
        for limit, options in re.findall(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$", table, re.MULTILINE)
        for name in re.findall(r"`--([\w-]+)`", options)
        if name != "max-model-len"
    ]
    assert len(found) > 10
    for limit, default in found:
        assert any(re.search(rf"\b{form}\b", limit) for form in forms_of(default)), limit


def forms_of(number: float | str) -> tuple[str, ...]:
    if isinstance(number, str):
        return (number,)
    return str(number), f"{number:,}", f"{number:g} s", f"{number / 2**20:g} MiB"

"""``serve --config FILE``."""

from __future__ import annotations

import pytest

from helpers.cli import invoke

USAGE = 2
FILE = """
model: from-file
port: 0
api-key: [a, b]
served_model_name: tiny
max-model-len: 4k
enable-prefix-caching: false
no-disable-log-stats: false
trust-remote-code: true
speculative-config: {method: ngram, num_speculative_tokens: 3}
drain-timeout: 2.5
lora-modules: [{name: sql, path: ./a}, chat=./b]
tokenizer:
"""


@pytest.fixture
def serve(started, tmp_path):
    """Runs ``serve`` with the text of a file, and returns the result and what was started."""

    def served(text: str, *arguments: str):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return invoke("serve", *arguments, "--config", str(path)), started

    return served


def test_a_file_gives_options(serve):
    result, ((engine, _, server, _),) = serve(FILE)
    assert result.exit_code == 0, result.output
    assert "--trust-remote-code (code of a checkpoint is never run)" in result.stderr
    assert (engine.model, engine.max_model_len, engine.tokenizer) == ("from-file", 4000, None)
    assert engine.enable_prefix_caching is False
    assert engine.speculative_config.num_speculative_tokens == 3
    assert engine.lora_modules == (("sql", "./a"), ("chat", "./b"))
    assert (server.api_key, server.served_model_name) == (("a", "b"), ("tiny",))
    assert (server.drain_timeout, server.disable_log_stats) == (2.5, True)


def test_the_command_line_wins(serve):
    given = ("mine", "--max-model-len", "64", "--enable-prefix-caching", "--api-key", "c")
    result, ((engine, _, server, _),) = serve(FILE, *given)
    assert result.exit_code == 0, result.output
    assert (engine.model, engine.max_model_len) == ("mine", 64)
    assert (engine.enable_prefix_caching, server.api_key) == (True, ("c",))


def test_an_empty_file_changes_nothing(serve):
    result, calls = serve("", "model", "--port", "0")
    assert (result.exit_code, len(calls)) == (0, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max-modl-len: 3", "unknown option 'max-modl-len'. Did you mean 'max_model_len'?"),
        ("config: other.yaml", "unknown option 'config'"),
        ("- a", "is no mapping"),
        ("a: [", "is no YAML"),
        ("max-model-len: many", "'many' is not a whole number"),
        ("quantization: fp8", "--quantization fp8 is not offered"),
        ("dtype: float8", "dtype='float8' is not possible"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(serve, text, why):
    result, calls = serve(text)
    assert (result.exit_code, calls) == (USAGE, [])
    assert why in " ".join(result.stderr.split())


def test_a_missing_file(tmp_path):
    result = invoke("serve", "--config", str(tmp_path / "no.yaml"))
    assert (result.exit_code, "no.yaml cannot be read" in result.stderr) == (USAGE, True)

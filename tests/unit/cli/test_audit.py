"""``sametoken audit``: what is checked before any work."""

from __future__ import annotations

import pytest

from helpers.cli import invoke
from sametoken.cli import audit as command

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    monkeypatch.setattr(command, "_look_at", lambda config: pytest.fail("a model was loaded"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("model", "--url", NOBODY), f"{NOBODY} does not list a model (ConnectError"),
        (("model", "--url", NOBODY, "--served-model", "m"), f"{NOBODY} cannot be reached"),
        (("--url", NOBODY, "--baseline-url", "http://h:1"), f"{NOBODY} does not list a model"),
        (
            ("--url", NOBODY, "--baseline-url", f"{NOBODY}/v1/"),
            f"--url and --baseline-url are one server, {NOBODY}. Give --baseline-url a server",
        ),
        (
            ("--url", NOBODY, "--baseline-url", "http://LOCALHOST:9"),
            f"--url and --baseline-url are one server, {NOBODY}. Give --baseline-url a server",
        ),
        (("m", "--baseline-url", NOBODY), "--baseline-url is of use with --url alone"),
        (("--url", "http://h:port", "--baseline-url", NOBODY), "'http://h:port' is no URL"),
        (("model", "--url", "127.0.0.1:9"), "'127.0.0.1:9' is no address. Give http://host:port"),
        (("--url", NOBODY), "there is no baseline"),
        (("m", "--url", NOBODY, "--api-key", "clé"), "the API key has a space or a character bey"),
        (("m", "--url", NOBODY, "--served-model", "\udcff"), "holds a lone surrogate"),
        (("model", "--url", NOBODY, "--dtype", "float8"), "dtype='float8'"),
        (("model", "--html", "/no/dir/audit.html"), "/no/dir/audit.html cannot be written"),
        (("model", "--prompts", "/no/file"), "/no/file cannot be read"),
        (("model", "--trainer", "/no/file"), "/no/file cannot be read"),
        (("--trainer", "/no/file"), "there is nothing to audit"),
        (("model", "--trainer", "x", "--url", NOBODY), "--url is of no use with --trainer"),
        (("m", "--trainer", "x", "--temperature", "1"), "--temperature is of no use with --tr"),
        (("m", "--trainer", "x", "--no-diagnose"), "--diagnose is of no use with --trainer"),
        (("m", "--url", NOBODY, "--alone", "8"), "--alone is of no use with --url"),
        (
            ("m", "--url", NOBODY, "--speculative-config", "ngram"),
            "--speculative-config is of no use with --url",
        ),
        (
            ("m", "--trainer", "x", "--speculative-config", "ngram"),
            "--speculative-config is of no use with --trainer",
        ),
        (("--url", NOBODY, "--tokenizer", "t"), "--tokenizer is of no use without MODEL. Give"),
        (("--url", NOBODY, "--baseline-url", NOBODY, "--raw"), "--raw is of no use without MODEL"),
        (("m", "--served-model", "x"), "--served-model is of use with --url alone"),
        (("model", "--checkpoint", "x"), "--checkpoint is of use with --trainer alone"),
        (("--limit", "1"), "there is nothing to audit. Give MODEL"),
        (("model",), "there is no speculation to audit"),
        (("model", "--lora-request", "sql"), "there is no adapter 'sql'"),
        (("model", "--lora-modules", "sql"), "'sql' is no adapter. Give NAME=PATH"),
        (("m", "--trainer", "x", "--lora-request", "sql"), "--lora-request is of no use with --tr"),
        (("model", "--dataset", "alpaca"), "dataset 'alpaca' is not known"),
        (("model", "--temperature", "warm"), "temperature='warm' is not a list of numbers"),
        (("model", "--temperature", "-1"), "temperature=-1.0 is not possible"),
        (("model", "--temperature", "0,101"), "temperature=101.0 is not possible"),
        (
            ("model", "--load-format", "dummy", "--speculative-config", "ngram"),
            "an audit of dummy weights is meaningless",
        ),
    ],
)
def test_servers_options_and_files_come_first(arguments, why):
    result = invoke("audit", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert why in line

"""The help: sections, sentences, topics, completion, and the docs' table of keys."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest
import typer

from helpers.cli import invoke
from sametoken.cli.help import as_markdown, speculative_keys
from sametoken.cli.main import app
from sametoken.cli.sections import as_sentence
from sametoken.config import SpeculativeConfig
from sametoken.types.speculative_methods import METHODS

PAGE = Path(__file__).parents[3] / "docs" / "speculative.md"
KEYS = re.compile(r"<!-- keys -->\n(.*)\n<!-- end of keys -->", re.DOTALL)
HEADING = re.compile(r"^(\w.*):$", re.MULTILINE)
run = partial(invoke, prog_name="sametoken")


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_docs_hold_the_table_of_the_code():
    """Otherwise put what ``sametoken help speculative --markdown`` prints between the marks."""
    (table,) = KEYS.findall(PAGE.read_text("utf-8"))
    assert table == as_markdown(speculative_keys())
    assert run("help", "speculative", "--markdown").stdout == table + "\n"


def test_the_table_has_every_key_with_its_values_default_and_methods():
    keys = {key.name: key for key in speculative_keys()}
    assert list(keys) == [field.name for field in dataclasses.fields(SpeculativeConfig)]
    assert keys["method"].values == ", ".join(METHODS)
    assert keys["draft_limits"].values == "adaptive, fixed"
    assert keys["prompt_lookup_max"].values == "1..1024"
    assert keys["token_map"].values == "text"
    assert (keys["prompt_lookup_max"].default, keys["model"].default) == ("5", "none")
    assert keys["suffix_decoding_min_token_prob"].methods == "suffix"
    assert keys["cascade"].methods == "draft_model, eagle, eagle3, mtp, medusa, mlp_speculator"
    for method, k in (("ngram", 8), ("draft_model", 4), ("mtp", 3)):
        assert f"{method} {k}" in keys["num_speculative_tokens"].default


def test_the_help_on_speculation_shows_every_key():
    shown = run("help", "speculative").stdout
    for key in speculative_keys():
        assert re.search(rf"^{key.name}  ", shown, re.MULTILINE)
        assert f"Default: {key.default}. Read by: {key.methods}." in words(shown)
        assert as_sentence(key.meaning) in words(shown)


@pytest.mark.parametrize("path", [[], ["generate"], ["bench"], ["bench", "latency"]])
def test_the_help_of_a_command_is_a_topic(path):
    assert run("help", *path).stdout == run(*path, "--help").stdout


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        (["chta"], "Did you mean 'chat'?"),
        (["speculativ"], "Did you mean 'speculative'?"),
        (["bench", "latenzy"], "Did you mean 'latency'?"),
        (["chat", "x"], "there is no help on 'x'"),
        (["chat", "--markdown"], "Give speculative"),
    ],
)
def test_an_unknown_topic_gets_a_suggestion(topic, hint):
    result = run("help", *topic)
    assert result.exit_code == 2
    assert hint in result.stderr


def test_commands_and_options_stand_in_sections():
    assert HEADING.findall(run("--help").stdout) == [
        *("Options", "Run a model", "Check, measure and train", "About")
    ]
    expected = ["Arguments", "Options", "Sampling options", "Engine options"]
    assert HEADING.findall(run("generate", "--help").stdout) == expected
    expected = ["Server options", "Serving limits options", "Ray options", "Engine options"]
    assert HEADING.findall(run("serve", "--help").stdout) == ["Arguments", "Options", *expected]


def test_choices_are_shown_as_lists():
    shown = run("generate", "--help").stdout
    assert "--dtype [auto|bfloat16|float32]" in shown
    assert "--load-format [auto|safetensors|gguf|gguf-packed|dummy]" in shown


def test_help_is_coloured_at_a_terminal_alone():
    assert "\x1b[" not in run("--help").stdout
    assert "\x1b[1mRun a model\x1b[0m:" in run("--help", color=True).stdout
    assert "\x1b[36m--dtype" in run("generate", "--help", color=True).stdout


def every_command(command, path=()):
    yield path, command
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from every_command(subcommand, (*path, name))


def test_every_option_is_explained():
    for path, command in every_command(typer.main.get_command(app)):
        shown = [one for one in command.params if not getattr(one, "hidden", False)]
        silent = [parameter.name for parameter in shown if not parameter.help]
        assert silent == [], path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed of the noise", "Seed of the noise."),
        ("gsm8k or humaneval", "gsm8k or humaneval."),
        ("vLLM option", "vLLM option."),
        ("number of requests [default: 3]", "Number of requests.  [default: 3]"),
        ("Done.", "Done."),
        ("", ""),
    ],
)
def test_sentences(text, sentence):
    assert as_sentence(text) == as_sentence(sentence) == sentence


def test_version_has_a_command_and_an_option():
    assert run("version").stdout == run("--version").stdout


def test_completion_can_be_shown_and_completes(monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    assert (
        "complete -o default -F _sametoken_completion sametoken" in run("--show-completion").stdout
    )
    assert "--install-completion" in run("--help").stdout
    asked = {
        "_SAMETOKEN_COMPLETE": "complete_bash",
        "COMP_WORDS": "sametoken ch",
        "COMP_CWORD": "1",
    }
    assert run(env=asked).stdout.split() == ["chat"]


def test_alone_and_off_a_terminal_it_prints_the_help():
    result = run()
    assert result.exit_code == 2
    assert result.stdout == run("--help").stdout

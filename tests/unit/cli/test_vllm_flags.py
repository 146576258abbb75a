"""Every flag of vLLM's table: accepted with one notice, or refused with the reason."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import typer

from helpers.cli import invoke
from sametoken.cli.main import app
from sametoken.cli.vllm_flags import SAME, TABLE, as_flag, flag, page
from sametoken.cli.vllm_words import our_words
from sametoken.errors import ConfigError
from sametoken.types.vllm_options import SHORT_FLAGS, take_vllm_options

PAGE = Path(__file__).parents[3] / "docs" / "vllm-flags.md"
USAGE = 2
#: A value that no option of the table accepts.
OTHER = "nonsense"
SERVE = typer.main.get_command(app).commands["serve"]
OPTIONS = [(options, name) for options, names in TABLE for name in names]
serve = partial(invoke, "serve", "model", "--port", "0")


def is_switch(options, name: str) -> bool:
    return name in options.switches


def words(options, name: str, value: str) -> list[str]:
    """The words of a command line that set an option to a value."""
    return [as_flag(name, value == "true")] if is_switch(options, name) else [flag(name), value]


def test_the_page_is_that_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run python -m sametoken.cli.vllm_flags > docs/vllm-flags.md"
    )


def test_no_option_is_there_twice():
    names = [name for _, name in OPTIONS]
    assert len(names) == len(set(names))
    assert not set(names) & set(SAME)
    assert set(SHORT_FLAGS) <= set(names)


def test_what_is_the_same_is_an_option_of_serve():
    offered = {text for one in SERVE.params for text in one.opts}
    assert {flag(name) for name in SAME} <= offered


def test_all_that_has_no_effect_takes_one_line(started):
    arguments, expected = [], []
    for options, name in OPTIONS:
        if options.accepted or not options.instead:
            value = options.accepted[0] if options.instead else "true"
            arguments += words(options, name, value)
            expected.append(f"{' '.join(words(options, name, value))} ({options.why})")
    result = serve(*arguments)
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("without effect here: ")
    # The order is that of the table, in which serve declares them.
    assert line.removeprefix("without effect here: ") == ", ".join(expected)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [pair for pair in OPTIONS if pair[0].instead],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_refused_says_why_and_what_to_do(started, options, name):
    value = OTHER
    if is_switch(options, name):
        value = "false" if options.accepts("true") else "true"
    with pytest.raises(ConfigError) as refused:
        SERVE.main(["model", *words(options, name, value)], standalone_mode=False)
    shown = as_flag(name, value == "true") if is_switch(options, name) else f"{flag(name)} {OTHER}"
    assert refused.value.cause == f"{shown} is not offered: {options.why}"
    assert refused.value.remedy == options.instead != ""
    assert started == []


@pytest.mark.parametrize(("name", "spellings"), SHORT_FLAGS.items())
def test_short_spellings(name, spellings):
    (param,) = (one for one in SERVE.params if one.name == name)
    assert set(spellings) <= set(param.opts)


@pytest.mark.parametrize(
    ("arguments", "notice"),
    [
        (["-O3"], "--optimization-level 3"),
        (["-pp", "1"], "--pipeline-parallel-size 1"),
        (["--no-async-scheduling"], "--no-async-scheduling"),
        (["--stream-interval=4"], "--stream-interval 4"),
    ],
)
def test_forms_of_a_flag(started, arguments, notice):
    assert f"without effect here: {notice} (" in serve(*arguments).stderr


def test_names_of_ours_for_vllm_s_flags(started):
    speculation = '{"method": "ngram", "num_speculative_tokens": 2}'
    result = serve(
        *("-tp", "1", "--uvicorn-log-level", "warning", "--num-gpu-blocks-override", "4K"),
        *("--max-logprobs", "5", "--max-model-len", "32k", "--kv-cache-memory-bytes", "1GiB"),
        *("--disable-log-stats", "--speculative-config", speculation),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    ((engine, _, server, _),) = started
    assert (engine.num_kv_blocks, engine.max_model_len) == (4096, 32000)
    assert engine.kv_cache_memory_bytes == 2**30
    assert (server.log_level, server.max_logprobs, server.disable_log_stats) == ("warning", 5, True)


SPECULATION = [
    ["-sc", '{"method": "ngram", "num_speculative_tokens": 2}'],
    ["--speculative_config", '{"method": "ngram", "num_speculative_tokens": 2}'],
    ["--spec_method", "ngram", "--spec-tokens=2"],
    ["--speculative-config.method", "ngram", "--speculative_config.num_speculative_tokens=2"],
]


@pytest.mark.parametrize("words", SPECULATION)
def test_speculation_in_every_form(started, words):
    result = serve("--max_model_len=64", *words, "--enforce_eager")
    assert (result.exit_code, result.stderr) == (0, "")
    ((engine, *_),) = started
    assert (engine.max_model_len, engine.enforce_eager) == (64, True)
    spec = engine.speculative_config
    assert (spec.method, spec.num_speculative_tokens) == ("ngram", 2)


@pytest.mark.parametrize("words", [["--max_model_len", "auto"], ["--max-model-len=-1"]])
def test_the_longest_context_that_fits_is_the_default(started, words):
    assert serve(*words, "--seed", "5").exit_code == 0
    ((engine, *_),) = started
    assert (engine.max_model_len, engine.seed) == (None, 5)


def test_keys_of_an_option_make_one_object():
    words = ["m", "--a_b.c_d.e", "1k", "--served-model-name", "x.y", "--a-b.c_d.f=[true]"]
    assert our_words([*words, "--a-b.g", "h_i.j", "--k_l=m_n.o"]) == [
        *("m", "--served-model-name", "x.y", "--k-l=m_n.o"),
        *("--a-b", '{"c_d": {"e": 1000, "f": [true]}, "g": "h_i.j"}'),
    ]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--a.b"], "--a.b has no value"),
        (["--a.b", "1", "--a.b", "2"], "--a.b is given twice"),
        (["--a.b", "1", "--a.b.c", "2"], "--a.b.c is a key of what has a value"),
        (["--spec-method", "mtp", "-sc", "ngram"], "--speculative-config is given whole and by"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(words, cause):
    with pytest.raises(ConfigError, match=cause):
        our_words(words)


def test_a_refusal_is_one_line(started):
    result = serve("--tool-parser-plugin", "mine.py")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --tool-parser-plugin mine.py is not offered: code from outside")
    assert (result.exit_code, started) == (USAGE, [])


def test_a_model_is_given_once(started):
    assert invoke("serve", "--model", "a", "--port", "0").exit_code == 0
    assert started[0][0].model == "a"
    assert invoke("serve", "a", "--model", "a", "--port", "0").exit_code == 0
    refused = invoke("serve", "b", "--model", "a")
    assert (refused.exit_code, len(started)) == (USAGE, 2)
    assert "two models were given, 'b' and --model 'a'" in refused.stderr


def test_a_revision_is_part_of_the_name_that_is_loaded_alone(started):
    words = ["serve", "org/model", "--revision", "v1", "--port", "0"]
    for more in ([], ["--served-model-name", "mine"]):
        result = invoke(*words, *more)
        assert (result.exit_code, result.stderr) == (0, "")
    names = [(engine.model, server.served_model_name) for engine, _, server, _ in started]
    assert names == [("org/model@v1", ("org/model",)), ("org/model@v1", ("mine",))]


def test_in_python_options_are_keywords():
    options = {"trust_remote_code": True, "quantization": None, "dtype": "float32"}
    notice = take_vllm_options(options)
    assert notice == (
        "without effect here: trust_remote_code=True (code of a checkpoint is never run)"
    )
    assert options == {"dtype": "float32"}
    assert take_vllm_options(options) is None
    with pytest.raises(ConfigError, match=r"^quantization='fp8' is not offered: .*config.json"):
        take_vllm_options({"quantization": "fp8"})
    offline = {"enable_sleep_mode": True, "disable_log_stats": True, "reasoning_parser": "qwen3"}
    with pytest.raises(ConfigError, match="--weight-transfer-config"):
        take_vllm_options(dict(offline))
    assert "an engine sleeps without a flag" in take_vllm_options(offline, offline=True)
    assert offline == {}
    assert "up to 20" in take_vllm_options({"max_logprobs": 20}, offline=True)
    for others in (
        {"max_logprobs": 50},
        {"weight_transfer_config": {"backend": "nccl"}},
        {"spec_method": "ngram"},
    ):
        with pytest.raises(ConfigError, match="is not offered"):
            take_vllm_options(others, offline=True)
    kept = {"skip_tokenizer_init": True}
    assert take_vllm_options(kept, kept=("skip_tokenizer_init",)) is None
    assert kept == {"skip_tokenizer_init": True}

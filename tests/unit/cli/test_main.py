"""The command line: options, exit codes and streams."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

import sametoken
from helpers.chat_model import write_chat_model
from helpers.cli import invoke as run
from helpers.hub import cache_snapshot
from sametoken.cli import generate as generate_module
from sametoken.cli.main import NO_COMMAND
from sametoken.cli.report import per_position
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.engine.request_memory import RequestMemory
from sametoken.errors import NumericalError, UnsupportedError
from sametoken.llm import LLM
from sametoken.types.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from sametoken.types.sampling_params import SamplingParams

SPECULATION = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.mark.parametrize(
    "command", [["generate"], ["chat"], ["audit"], ["bench", "latency"], ["train", "eagle3"]]
)
@pytest.mark.parametrize("model", [["--model", "m"], ["--model=m"]])
def test_a_model_given_as_an_option_is_told_where_it_stands(command, model):
    result = run(*command, *model)
    assert result.exit_code == 2
    assert f"{' '.join(command)} MODEL" in " ".join(result.output.split())


class FakeInputs:
    """Takes every prompt as it is."""

    def tokenize(self, text):
        return text

    def tokenize_chat(self, messages):
        return ("chat", messages[0]["content"])

    def process(self, request_id, prompt, params):
        pass


class FakeUnloaded:
    """What is known of a model before it is loaded."""

    inputs = FakeInputs()

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.6)


class FakeLLM:
    """Says three words, and notes how it was asked."""

    def __init__(self, config: EngineConfig) -> None:
        self.asked: dict = {}
        self.error: Exception | None = None
        generate_module.announce(f"loading {config.model}")
        self.resolved = SimpleNamespace(
            config=config,
            reasons={"dtype": "the checkpoint is fp32"},
            model=SimpleNamespace(architecture="LlamaForCausalLM"),
            attention_kernels="native",
            request_memory=RequestMemory(),
            **dict.fromkeys(
                ("dtype", "kv_cache_dtype", "device", "steps_in_flight", "model_path", "kernels"),
                "resolved",
            ),
            **dict.fromkeys(("max_model_len", "num_kv_blocks"), 2048),
            **dict.fromkeys(("weights_bytes", "kv_bytes", "recurrent_bytes", "step_bytes"), 2**20),
            kept_states_bytes=2**20,
            num_kept_states=3,
            adapters_bytes=0,
        )

    def generate_stream(self, prompt, params, *, lora_request):
        self.asked.update(prompt=prompt, params=params, adapter=lora_request)
        metrics = RequestMetrics(10.0, 10.5, None)
        for length in (1, 2, 3):
            metrics = dataclasses.replace(
                metrics,
                finished_time=12.5 if length == 3 else None,
                speculation=metrics.speculation + SpeculationMetrics.of([(4, 1)]),
            )
            text = " ".join(["one", "two", "three"][:length])
            completion = CompletionOutput(
                0, text, tuple(range(length)), "length" if length == 3 else None, error=self.error
            )
            yield RequestOutput("0", "p", (5, 6), (completion,), length == 3, metrics)


@pytest.fixture
def llm(monkeypatch):
    """The last FakeLLM that a command loaded."""
    loaded = SimpleNamespace(last=None, error=None, all=[])

    def load(unloaded):
        loaded.last = FakeLLM(unloaded.config)
        loaded.last.error = loaded.error
        loaded.all.append(loaded.last)
        return loaded.last

    def without_drafts(unloaded):
        return FakeUnloaded(dataclasses.replace(unloaded.config, speculative_config=None))

    monkeypatch.setattr(generate_module, "_look_at", FakeUnloaded)
    monkeypatch.setattr(generate_module, "_without_drafts", without_drafts)
    monkeypatch.setattr(generate_module, "_load", load)
    return loaded


def test_text_goes_to_stdout_and_everything_else_to_stderr(llm):
    result = run("generate", "some-model", "--prompt", "hello")
    assert result.exit_code == 0
    assert result.stdout == "one two three\n"
    assert "loading some-model" in result.stderr
    assert "2 prompt tokens, first token after 0.50 s; 3 tokens, 1.0 tokens/s" in result.stderr
    assert "acceptance length 2.00, per position 100 0 0 0%" in result.stderr
    assert llm.last.asked["prompt"] == "hello"


def test_only_given_sampling_options_replace_the_recommended_ones(llm):
    run("generate", "--prompt", "x", "--top-k", "3", "--stop", "a", "--stop", "b", "--seed", "0")
    params = llm.last.asked["params"]
    assert params == SamplingParams(
        temperature=0.6, top_k=3, stop=("a", "b"), seed=0, max_tokens=256
    )
    run("generate", "--prompt", "x", "--temperature", "0", "--max-tokens", "5", "--ignore-eos")
    assert llm.last.asked["params"] == SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True
    )


@pytest.mark.parametrize(("first_token", "status"), [(0, 0), (7, 1)])
def test_compare_answers_without_drafts_first(llm, monkeypatch, first_token, status):
    stream = FakeLLM.generate_stream

    def changed(output):
        (said,) = output.outputs
        said = dataclasses.replace(said, token_ids=(first_token, *said.token_ids[1:]))
        metrics = output.metrics
        if metrics.finished_time:
            metrics = dataclasses.replace(metrics, finished_time=14.5)
        return dataclasses.replace(output, outputs=(said,), metrics=metrics)

    def slower_and_maybe_wrong(self, prompt, params, *, lora_request):
        outputs = stream(self, prompt, params, lora_request=lora_request)
        yield from map(changed, outputs) if self is llm.all[0] else outputs

    monkeypatch.setattr(FakeLLM, "generate_stream", slower_and_maybe_wrong)
    result = run(
        *("generate", "--chat", "x", "--compare", "--seed", "3"),
        *("--speculative-config", SPECULATION),
    )
    assert result.exit_code == status
    assert result.stdout == "one two three\n"
    plain, drafted = (each.resolved.config.speculative_config for each in llm.all)
    assert plain is None
    assert drafted.method == "ngram"
    assert llm.all[0].asked == llm.all[1].asked
    says = "the tokens differ from number 1 on" if status else "the same 3 tokens"
    line = f"[plain 0.5 tokens/s, with drafts 1.0 (2.00x): {says}]"
    assert result.stderr.splitlines()[-1] == line


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A checkpoint with a tokenizer and without a chat template."""
    directory = write_chat_model(tmp_path_factory.mktemp("models") / "base")
    (directory / "chat_template.jinja").unlink()
    return directory


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--chat", "hi"], "the model has no chat template. Give a text to continue"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a" * 2000], "2000 tokens"),
        (
            ["--prompt", "x", "--compare", "--speculative-config", '{"model": "./none"}'],
            "'./none' is neither a path",
        ),
    ],
)
def test_what_the_model_cannot_answer_is_refused_before_it_is_loaded(
    base_model, monkeypatch, arguments, cause
):
    monkeypatch.setattr(LLM, "from_unloaded", None)
    result = run("generate", str(base_model), *arguments)
    assert result.exit_code == 2
    assert cause in result.stderr


def test_compare_looks_the_model_up_once(base_model, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    files = {path.name: path.read_bytes() for path in base_model.iterdir()}
    folder = cache_snapshot(tmp_path, "tiny/base", files)
    asked = ("generate", "tiny/base", "--prompt", "the", "--max-tokens", "3", "--compare")
    result = run(*asked, "--speculative-config", SPECULATION)
    assert result.exit_code == 0
    assert result.stderr.count(f"using tiny/base from {folder}\n") == 1
    assert "the same 3 tokens" in result.stderr


@pytest.mark.parametrize(
    "others",
    [
        [],
        ["--speculative-config", "null"],
        ["--json", "--speculative-config", SPECULATION],
    ],
)
def test_compare_needs_drafts_and_prints_text(llm, others):
    result = run("generate", "--prompt", "x", "--compare", *others)
    assert result.exit_code == 2
    assert "--compare needs --speculative-config, and prints no JSON" in result.stderr
    assert not llm.all


def test_engine_options_reach_the_engine(llm):
    run(
        *("generate", "--prompt", "x", "--dtype", "float32", "--max-num-seqs", "2"),
        *("--no-enable-prefix-caching", "--speculative-config", SPECULATION),
    )
    assert llm.last.resolved.config == EngineConfig(
        dtype="float32",
        max_num_seqs=2,
        enable_prefix_caching=False,
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=4),
    )


def test_an_adapter_answers_that_is_named(llm):
    words = ("generate", "--prompt", "x", "--lora-modules", "sql=./a", "--lora-request")
    run(*words, "sql")
    assert llm.last.asked["adapter"] == "sql"
    llm.all.clear()
    refused = run(*words, "sq")
    assert (refused.exit_code, llm.all) == (2, [])
    assert "there is no adapter 'sq'. Did you mean 'sql'?" in refused.stderr


def test_every_engine_option_is_offered_or_named_as_left_out():
    text = run("generate", "--help").stdout
    for field in dataclasses.fields(EngineConfig):
        offered = f"--{field.name.replace('_', '-')}" in text
        assert offered == (field.name not in ("model", "skip_tokenizer_init")), field.name


def test_prompts_come_from_files_stdin_and_chat(llm, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("from a file")
    run("generate", "-f", str(path))
    assert llm.last.asked["prompt"] == "from a file"
    run("generate", "-f", "-", input="from stdin")
    assert llm.last.asked["prompt"] == "from stdin"
    run("generate", "--chat", "hi")
    assert llm.last.asked["prompt"] == ("chat", "hi")


def test_json_is_one_object_and_nothing_else(llm):
    result = run("generate", "--prompt", "x", "--json")
    value = json.loads(result.stdout)
    assert (value["text"], value["token_ids"]) == ("one two three", [0, 1, 2])
    assert value["speculation"]["acceptance_length"] == 2.0
    assert value["speculation"]["acceptance_per_position"] == [1.0, 0.0, 0.0, 0.0]


def test_what_is_made_up_is_said_beside_every_result(llm):
    synthetic = json.loads(SPECULATION) | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    arguments = ("generate", "--prompt", "x", "--load-format", "dummy")
    arguments += ("--speculative-config", json.dumps(synthetic))
    assert "[DUMMY WEIGHTS; SYNTHETIC ACCEPTANCE; 2 prompt tokens" in run(*arguments).stderr
    shown = json.loads(run(*arguments, "--json").stdout)
    assert shown["synthetic"] == ["dummy weights", "synthetic acceptance"]
    explained = run("generate", "--explain", *arguments[3:]).stdout
    assert "dummy weights, synthetic acceptance" in explained
    assert json.loads(run("generate", "--prompt", "x", "--json").stdout)["synthetic"] == []


def test_explain_shows_settings_and_reasons_and_needs_no_prompt(llm):
    result = run("generate", "--explain")
    assert result.exit_code == 0
    assert "resolved  (the checkpoint is fp32)" in result.stdout
    assert llm.last.asked == {}
    beside_an_answer = run("generate", "--explain", "--prompt", "a")
    assert "resolved  (the checkpoint is fp32)" in beside_an_answer.stderr
    assert "the checkpoint is fp32" not in beside_an_answer.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "some-model"],
        ["generate", "--prompt", "a", "--chat", "b"],
        ["generate", "-f", "no/such/file"],
        ["generate", "--prompt", "a", "--max-tokens", "many"],
        ["generate", "--explain", "--json"],
        ["generate", "--prompt", "a", "--no-such-option"],
        ["generate", "--prompt", "a", "--dtype", "float8"],
        ["generate", "--prompt", "a", "--top-p", "3"],
        ["generate", "--prompt", "a", "--speculative-config", "{"],
        ["no-such-command"],
    ],
)
def test_wrong_use_exits_with_2_before_a_model_is_loaded(llm, arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "rror: " in result.stderr
    assert llm.all == []


def test_impossible_sampling_is_refused_before_a_model_is_loaded(llm):
    result = run("generate", "--prompt", "a", "--temperature", "200")
    assert (
        result.stderr
        == "error: temperature=200.0 is not possible. Use a number from 0.0 to 100.0\n"
    )
    assert llm.all == []


def test_what_is_not_supported_exits_with_3(llm, monkeypatch):
    def refuse(unloaded):
        raise UnsupportedError("no such device", "use cpu")

    monkeypatch.setattr(generate_module, "_load", refuse)
    result = run("generate", "--prompt", "a")
    assert (result.exit_code, result.stderr) == (3, "error: no such device. Use cpu\n")


def test_a_request_that_fails_is_an_error(llm):
    llm.error = NumericalError("the logits were NaN", "use float32")
    result = run("generate", "--prompt", "a")
    assert result.exit_code == 2
    assert "error: the logits were NaN. Use float32" in result.stderr


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_interrupts_and_broken_pipes_are_quiet(llm, monkeypatch, raised, code):
    def fail(piece):
        raise raised

    monkeypatch.setattr(generate_module, "_write", fail)
    result = run("generate", "--prompt", "a")
    assert result.exit_code == code
    assert result.stderr.splitlines() == [f"loading {EngineConfig().model}"]


def python(*arguments: str, **streams) -> subprocess.CompletedProcess:
    """Run a process to its end, its output captured where no stream is given."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run([sys.executable, *arguments], check=False, **pipes | streams)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is full")
@pytest.mark.parametrize("command", ["help", "--version"])
def test_an_output_without_room_is_one_line(command):
    with open("/dev/full", "w") as full:
        result = python("-m", "sametoken", command, stdout=full)
    cause = "error: the output cannot be written (no space left on device). Make room"
    assert (result.returncode, result.stderr.splitlines()) == (2, [cause])


@pytest.mark.parametrize(
    "command", ["bench throughput --dataset custom --path", "audit --prompts", "bench report"]
)
def test_a_path_that_cannot_be_looked_up_is_one_line(command):
    name = "a" * 300
    result = run(*command.split(), name)
    remedy = "Check the name, and the permissions of its folders"
    cause = f"error: {name} cannot be used (file name too long). {remedy}"
    assert (result.exit_code, result.stderr.splitlines()) == (2, [cause])


WITH_A_STATUS_LINE = """
from sametoken.cli import main, report
main.app = lambda: (report.announce("lost"), print("kept"))
main.main()
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is full")
@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (("-c", WITH_A_STATUS_LINE), 0, "kept\n"),
        (("-m", "sametoken", "env", "--no-such-option"), 2, ""),
        (("-m", "sametoken", "generate", "--prompt", "a", "--temperature", "200"), 2, ""),
    ],
)
def test_a_stderr_without_room_changes_no_result(arguments, status, shown):
    with open("/dev/full", "w") as full:
        result = python(*arguments, stderr=full)
    assert (result.returncode, result.stdout) == (status, shown)


def test_a_closed_stderr_changes_no_result():
    command = shlex.join([sys.executable, "-c", WITH_A_STATUS_LINE]) + " 2>&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "kept\n")


@pytest.mark.parametrize("topic", [(), ("speculative",)])
def test_a_reader_that_left_is_no_error(topic):
    reader, writer = os.pipe()
    os.close(reader)
    result = python("-m", "sametoken", "help", *topic, stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_streams_that_the_caller_has_closed_are_no_error(closed):
    command = f"{shlex.quote(sys.executable)} -m sametoken help {closed}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_closed_stdin_is_an_empty_one():
    command = f"{shlex.quote(sys.executable)} -m sametoken 0<&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (NO_COMMAND, "")
    assert "Usage" in result.stdout


def test_bytes_on_stdin_that_are_no_text_are_refused_before_a_model_is_looked_for():
    command = ("-m", "sametoken", "generate", "no-such-model", "-f", "-")
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:surrogateescape"}
    result = python(*command, input="café", encoding="latin-1", env=environment)
    assert result.returncode == 2
    assert "- cannot be read as text" in result.stderr


def test_env_reports_facts():
    facts = json.loads(run("env", "--json").stdout)
    assert facts["sametoken"] == sametoken.__version__
    assert facts["kernels"]
    assert {"torch", "cpu", "threads", "compiler", "cache"} <= facts.keys()
    assert "torch" in run("env").stdout


@pytest.mark.parametrize(
    ("named", "found"), [("no-such-compiler", "none"), ("/bin/sh -c", "/bin/sh -c")]
)
def test_env_reports_the_compiler_that_kernels_would_have(monkeypatch, named, found):
    monkeypatch.setenv("SAMETOKEN_KERNELS", "reference")
    monkeypatch.setenv("CC", named)
    assert json.loads(run("env", "--json").stdout)["compiler"] == found


def test_version():
    assert run("--version").stdout == f"sametoken {sametoken.__version__}\n"


def test_acceptance_per_position_fits_a_line():
    assert per_position((1.0, 0.5, *[0.0] * 7)) == "100 50 0 0 0 0 0 0 ..%"
    assert per_position((1.0, 0.5, 0.0), 3) == "100 50 0%"
    assert per_position(()) == "-"

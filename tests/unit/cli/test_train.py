"""``sametoken train`` from the command line."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import partial

import pytest

from helpers.chat_model import write_chat_model
from helpers.cli import invoke
from helpers.hybrids import write_hybrid
from sametoken.cli import train as command
from sametoken.errors import NumericalError
from sametoken.train import generate
from sametoken.train.distillation import Distillation

QUICK = ["--steps", "3", "--warmup-steps", "1", "--device", "cpu", "--validation", "0"]
HEAD = ["--draft-vocab-size", "20", "--ttt-steps", "2", "--aux-layers", "1,2,4"]
run = partial(invoke, "train")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"the rain"\n{"prompt": "a thing", "temperature": 1.0}\n')
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"prompt": "what is it", "answer": "the rain in the car"}\n')
    return path


def test_text_then_a_token_map(target, prompts, tmp_path):
    text, chosen = tmp_path / "text.jsonl", tmp_path / "map.json"
    run("text", target, text, "--prompts", prompts, "--max-tokens", 6, "--device", "cpu")
    made = run("token-map", target, chosen, "--text", text, "--size", 9, "--json")
    assert made.exit_code == 0, made.output
    result = json.loads(made.stdout)
    token_ids = json.loads(chosen.read_text())
    assert len(token_ids) == result["tokens"] == 9
    assert token_ids == sorted(set(token_ids))
    assert 0 < result["coverage"] <= 1
    chosen.unlink()
    told = run("token-map", target, chosen, "--text", text, "--size", 9)
    assert "9 of" in told.output
    refused = run("token-map", target, tmp_path / "no" / "map.json", "--text", text)
    assert "cannot be written" in str(refused.exception) + refused.output


@pytest.mark.parametrize("arguments", [("text", "--prompts"), ("token-map", "--text")])
def test_a_file_that_is_there_stays_and_nothing_is_read(tmp_path, arguments):
    output, missing = tmp_path / "kept", tmp_path / "missing"
    output.write_text("kept")
    name, source = arguments
    refused = run(name, missing, output, source, missing)
    assert refused.exit_code == 2
    assert f"{output} is there already" in refused.output
    assert output.read_text() == "kept"


def test_text_then_a_head(target, prompts, tmp_path):
    text, head = tmp_path / "text.jsonl", tmp_path / "head"
    written = run("text", target, text, "--prompts", prompts, "--max-tokens", 6, "--device", "cpu")
    assert written.exit_code == 0, written.output
    assert "2 answers" in written.output
    assert len(text.read_text().splitlines()) == 2

    trained = run("eagle3", target, head, "--text", text, *HEAD, *QUICK, "--json")
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["steps"] == 3
    config = json.loads((head / "config.json").read_text())
    assert config["speculators_config"]["algorithm"] == "eagle3"
    assert config["draft_vocab_size"] == 20


@pytest.mark.parametrize(
    ("row", "options", "cause"),
    [
        ({"prompt": "a"}, ("--max-seconds", "-1"), "max_seconds=-1.0 is not possible"),
        ({"prompt": "a"}, ("--max-seconds", "nan"), "max_seconds=nan is not possible"),
        ({"prompt": "a"}, ("--temperature", "-1"), "temperature=-1.0 is not possible"),
        ({"text": "a"}, (), "line 2 of {path} is no prompt"),
    ],
)
def test_options_and_prompts_are_checked_before_the_model_loads(
    tmp_path, monkeypatch, row, options, cause
):
    monkeypatch.setattr("sametoken.engine.unloaded.validate", None)
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"a thing"\n{json.dumps(row)}\n')
    refused = run("text", "model", tmp_path / "text.jsonl", "--prompts", path, *options)
    assert refused.exit_code == 2
    assert cause.format(path=path) in refused.stderr


def test_a_prompt_that_the_model_refuses_is_placed_before_it_is_loaded(
    target, tmp_path, monkeypatch
):
    monkeypatch.setattr("sametoken.llm.build_requested", None)
    path = tmp_path / "prompts.jsonl"
    calls = {"role": "assistant", "tool_calls": 3}
    path.write_text(f'"a thing"\n{json.dumps({"messages": [calls]})}\n')
    refused = run("text", target, tmp_path / "text.jsonl", "--prompts", path, "--device", "cpu")
    assert refused.exit_code == 2
    assert f"line 2 of {path} cannot be answered (the chat template refuses" in refused.stderr


@pytest.mark.parametrize("name", ["eagle3", "token-map"])
def test_bad_text_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, name):
    for place in ("models.names.resolve_model", "text.tokenizer.load_tokenizer"):
        monkeypatch.setattr(f"sametoken.{place}", None)
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    refused = run(name, "model", tmp_path / "out", "--text", text)
    assert refused.exit_code == 2, refused.output
    assert f"line 2 of {text} is no text (answer is no text)" in refused.stderr
    assert '{"messages": [..]}' in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_training_that_cannot_begin_shows_no_bar(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"texts": "a"}\n')
    refused = run("lm", tmp_path / "lm", "--text", text, "--device", "cpu")
    assert refused.exit_code == 2
    assert f"line 1 of {text}" in refused.stderr
    assert "0/?" not in refused.output


@pytest.mark.parametrize("name", ["eagle3", "draft"])
@pytest.mark.parametrize("source", ["--text", "--generate-from"])
@pytest.mark.parametrize(
    ("kept", "what"), [("config.json", "a model"), ("checkpoint.pt", "an unfinished training")]
)
def test_an_earlier_training_is_kept_and_nothing_is_read(tmp_path, name, source, kept, what):
    output, missing = tmp_path / "out", tmp_path / "missing"
    output.mkdir()
    (output / kept).write_text("kept")
    refused = run(name, missing, output, source, missing)
    assert refused.exit_code == 2, refused.output
    assert f"{output} holds {what} already. Choose another output, remove it" in refused.stderr
    assert (output / kept).read_text() == "kept"


def test_a_training_that_never_began_is_not_resumed_and_nothing_is_read(tmp_path):
    output, missing = tmp_path / "out", tmp_path / "missing"
    refused = run("draft", missing, output, "--text", missing, "--resume")
    assert refused.exit_code == 2, refused.output
    assert f"{output / 'checkpoint.pt'} does not exist. Leave resume out" in refused.stderr


def test_a_llama_needs_no_word_about_the_module(tmp_path):
    text, sizes = tmp_path / "text.txt", []
    text.write_text("the rain in the car " * 20)
    for name in ("hidden-size", "intermediate-size", "head-dim", "max-length"):
        sizes += [f"--{name}", 16]
    sizes += ["--num-heads", 2, "--num-layers", 1, "--vocab-size", 300]
    sizes += ["--batch-tokens", 16, "--steps", 1]
    options = ["--text", text, "--architecture", "llama", *sizes, "--device", "cpu"]
    trained = run("lm", tmp_path / "lm", *options)
    assert trained.exit_code == 0, trained.output
    assert json.loads((tmp_path / "lm" / "training.json").read_text())["settings"]["mtp_steps"] == 0
    refused = run("lm", tmp_path / "lm", *options)
    assert f"{tmp_path / 'lm'} holds a model already" in refused.stderr


def test_an_existing_text_is_kept(target, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("sametoken.engine.unloaded.validate", None)
    text = tmp_path / "text.jsonl"
    text.write_text("hours of answers\n")
    refused = run("text", target, text, "--prompts", prompts, "--device", "cpu")
    assert refused.exit_code == 2
    assert f"{text} is there already. Remove it, or choose another output" in refused.stderr
    assert text.read_text() == "hours of answers\n"


def interrupted(*arguments):
    """Ctrl-C as soon as the first answer is finished."""

    def interrupt(keeper, key, done):
        take(keeper, key, done)
        signal.raise_signal(signal.SIGINT)

    take = generate._Keeper._take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate._Keeper, "_take", interrupt)
        stopped = run(*arguments)
    assert stopped.exit_code == 130, stopped.output
    assert "; the same command goes on from them" in stopped.stderr


def test_answers_go_on_after_an_interrupt(target, prompts, tmp_path):
    text = tmp_path / "text.jsonl"
    command = ["text", target, text, "--prompts", prompts, "--max-tokens", 6, "--device", "cpu"]
    # The first of the two ends early.
    interrupted(*command, "--max-num-seqs", 1)
    written = run(*command, "--max-num-seqs", 1)
    assert written.exit_code == 0, written.output
    assert "1 answer of" in written.output
    assert "1 kept from an earlier run" in written.output
    assert len(text.read_text().splitlines()) == 2


def test_answers_that_fail_are_told(target, prompts, tmp_path, monkeypatch):
    take = generate._Keeper._take

    def fail_one(keeper, key, done):
        if not keeper.errors:
            error = NumericalError("its logits are no numbers", "use another dtype")
            done = replace(done, outputs=(replace(done.outputs[0], error=error),))
        take(keeper, key, done)

    monkeypatch.setattr(generate._Keeper, "_take", fail_one)
    text = tmp_path / "text.jsonl"
    options = ["--prompts", prompts, "--max-tokens", 6, "--device", "cpu", "--max-num-seqs", 1]
    written = run("text", target, text, *options)
    assert written.exit_code == 0, written.output
    assert "prompts without an answer: 1; first: its logits are no numbers" in written.stderr
    assert len(text.read_text().splitlines()) == 1


def test_a_resumed_training_has_its_answers_and_a_new_one_keeps_them(
    target, prompts, tmp_path, monkeypatch
):
    head, options = tmp_path / "head", ["--generate-from", prompts, "--answer-tokens", 6]
    command = ["eagle3", target, head, *options, *HEAD, *QUICK]
    interrupted(*command)
    trained = run(*command)
    assert trained.exit_code == 0, trained.output
    answers = (head / "text.jsonl").read_bytes()
    monkeypatch.setattr("sametoken.engine.unloaded.validate", None)
    resumed = run(*command, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert f"the answers in {head / 'text.jsonl'} are there" in resumed.stderr
    # As if that training had ended before its first checkpoint.
    for name in ("checkpoint.pt", "config.json"):
        (head / name).unlink()
    refused = run(*command)
    assert refused.exit_code == 2
    assert f"Give --text {head / 'text.jsonl'} in place of --generate-from" in refused.stderr
    assert (head / "text.jsonl").read_bytes() == answers


def test_an_interrupted_training_goes_on(target, text, tmp_path, monkeypatch):
    head = tmp_path / "head"
    command = ["eagle3", target, head, "--text", text, *HEAD, *QUICK]

    def interrupt(objective, step):
        signal.raise_signal(signal.SIGINT)
        return loss(objective, step)

    loss = Distillation.loss
    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "loss", interrupt)
        stopped = run(*command)
    assert stopped.exit_code == 130
    assert f"{head / 'checkpoint.pt'} is kept; --resume goes on from it" in stopped.stderr
    assert "holds an unfinished training already" in run(*command).stderr
    resumed = run(*command, "--resume", "--json")
    assert json.loads(resumed.stdout)["steps"] == 3


def test_a_head_straight_from_prompts(target, prompts, tmp_path, monkeypatch):
    """A log gets lines in place of a bar."""
    monkeypatch.setattr("sametoken.cli.train._LINE_INTERVAL_S", 0.0)
    options = ["--generate-from", prompts, "--answer-tokens", 6]
    trained = run("eagle3", target, tmp_path / "head", *options, *HEAD, *QUICK)
    assert trained.exit_code == 0, trained.output
    assert "step 3 of 3" in trained.stderr
    assert "loss" in trained.stderr
    assert "acceptance length" in trained.output
    # QUICK holds none back.
    assert "measured on the training text itself: none was held back" in trained.output
    assert (tmp_path / "head" / "text.jsonl").is_file()
    assert (tmp_path / "head" / "model.safetensors").is_file()


def test_figures_say_what_they_were_measured_on():
    assert command._measured_on(12, 12) == "measured on 12 held-back answers"
    assert command._measured_on(12, 5) == "measured on 5 of 12 held-back answers"
    assert command._measured_on(1, 1).startswith("measured on one held-back answer alone: use more")


def test_answers_as_text_go_through_the_chat_template(target, text, tmp_path):
    trained = run("eagle3", target, tmp_path / "head", "--text", text, *HEAD, *QUICK, "--json")
    assert trained.exit_code == 0, trained.output
    # The answer, its end of turn and the line break behind it.
    assert json.loads(trained.stdout)["tokens"] > len("the rain in the car") // 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "one source of text"),
        (["--text", "a", "--states", "b"], "one source of text"),
        (["--text", "nowhere.jsonl"], "cannot be read"),
        (["--text", "nowhere.jsonl", "--ttt-steps", "0"], "ttt_steps=0"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(target, tmp_path, options, says):
    found = run("eagle3", target, tmp_path / "head", *options)
    assert found.exit_code == 2
    (line,) = found.stderr.splitlines()
    assert says in line


def test_a_drafter_and_a_language_model(target, text, tmp_path):
    sizes = ["--hidden-size", 16, "--num-layers", 1, "--num-heads", 2, "--intermediate-size", 16]
    drafted = run(
        "draft", target, tmp_path / "draft", "--text", text, *sizes, *QUICK, "--verified-drafts", 2
    )
    assert drafted.exit_code == 0, drafted.output
    assert "sequences to train on: 1, with " in drafted.output
    result = json.loads((tmp_path / "draft" / "training.json").read_text())["result"]
    assert len(result["acceptance"]) == 2
    assert "acceptance length" in drafted.output
    assert (tmp_path / "draft" / "tokenizer.json").is_file()

    small = ["--vocab-size", 300, "--head-dim", 16, "--linear-head-dim", 8, "--num-kv-heads", 1]
    small += ["--batch-tokens", 64, "--max-length", 32, "--steps", 2, "--device", "cpu"]
    sizes[3] = 4
    trained = run("lm", tmp_path / "lm", "--text", f"{text}=0.5", *small, *sizes, "--json")
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["trained_tokens"] == 128

    module = run("mtp", tmp_path / "lm", tmp_path / "mtp", "--text", text, *QUICK, "--json")
    assert module.exit_code == 0, module.output
    assert len(json.loads(module.stdout)["acceptance"]) == 3


@pytest.mark.parametrize(
    ("kind", "options", "status", "words"),
    [
        ("eagle3", ["--aux-layers", "1,2,9"], 2, "the target has no layers"),
        ("mtp", [], 3, "no module for further tokens is trained"),
        ("draft", [], 3, "cannot be a target in training"),
    ],
)
def test_a_target_that_does_not_fit_answers_nothing_first(
    target, prompts, tmp_path, monkeypatch, kind, options, status, words
):
    monkeypatch.setattr(command, "_write_text", None)
    target = write_hybrid(tmp_path / "hybrid") if kind == "draft" else target
    refused = run(kind, target, tmp_path / "out", "--generate-from", prompts, *QUICK, *options)
    assert refused.exit_code == status, refused.output
    assert words in refused.output

"""``sametoken eval``: the bar and the comparison decide the exit code."""

from __future__ import annotations

import json
import logging
import math
import shutil

import pytest
import torch

from helpers.chat_model import write_chat_model
from helpers.cli import invoke
from sametoken.bench import accuracy
from sametoken.bench.accuracy import Evaluation
from sametoken.engine import unloaded
from sametoken.errors import ConfigError
from sametoken.llm import LLM

pytest.importorskip("lm_eval", reason="lm-eval, the extra eval, is not installed")

from lm_eval import tasks

SIZES = ("--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "256", "--max-num-seqs", "4")
NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return str(write_chat_model(tmp_path_factory.mktemp("eval") / "model"))


def run(model, *arguments):
    return invoke("eval", "gsm8k", model, *SIZES, *arguments)


def fake(monkeypatch, score, plain=(1, 2)):
    def evaluate(llm, tasks, asked, *, plain_answers=plain, plain=False):
        answers = list(plain_answers if plain else (1, 2))
        return Evaluation({"gsm8k": {"exact_match,flexible-extract": score}}, answers, 0)

    monkeypatch.setattr(accuracy, "evaluate", evaluate)


def test_questions_of_a_file_with_drafts_and_without(model, tmp_path, caplog):
    # Another test may have silenced it.
    logging.getLogger("lm_eval").setLevel(logging.NOTSET)
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"the inner {i}", "answer": f"#### {i}"} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--path", str(path), "--limit", "2", "--num-fewshot", "1", "--max-tokens", "8")
    result = run(model, *arguments, *NGRAM, "--compare-plain", "--json")
    assert result.exit_code == 0, result.output
    assert not [one.getMessage() for one in caplog.records if one.name.startswith("lm_eval")]
    value = json.loads(result.stdout[result.stdout.index("{") :])
    assert (value["num_answers"], value["answers_that_differ"]) == (2, 0)
    assert set(value["scores"]["gsm8k"]) == {
        "exact_match,strict-match",
        "exact_match,flexible-extract",
    }


def test_an_adapter_that_was_not_loaded_is_refused_before_the_model_is_looked_at(monkeypatch):
    monkeypatch.setattr(unloaded.UnloadedModel, "of", None)
    result = run("toy", "--lora-modules", "sql=./a", "--lora-request", "sq")
    assert (result.exit_code, "there is no adapter 'sq'" in result.output) == (2, True)


@pytest.mark.parametrize(("bar", "code"), [("0.49", 0), ("0.5", 0), ("0.51", 1)])
def test_the_bar_decides_the_exit_code(model, monkeypatch, bar, code):
    fake(monkeypatch, 0.5)
    result = run(model, "--min-score", bar)
    assert result.exit_code == code
    assert f"gsm8k: 0.5000 is {'below' if code else 'at least'} {bar}" in result.stdout


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_fails_and_is_called_so(model, monkeypatch, score):
    fake(monkeypatch, score)
    result = run(model, "--min-score", "0.1")
    assert result.exit_code == 1
    assert "gsm8k: the score is not a number, or not finite" in result.stdout
    assert "at least" not in result.stdout
    assert '"exact_match,flexible-extract": null' in run(model, "--json").stdout


def test_checks_of_nothing_fail_and_say_why(model, monkeypatch):
    monkeypatch.setattr(accuracy, "evaluate", lambda *args, **options: Evaluation({}, [], 0))
    result = run(model, *NGRAM, "--compare-plain")
    assert result.exit_code == 1
    assert "there are no answers to compare with plain decoding" in result.stdout
    result = run(model, "--min-score", "0")
    assert result.exit_code == 1
    assert "gsm8k has no score\nno score is there to compare with 0\n" in result.stdout
    assert run(model).exit_code == 0


def test_a_task_without_a_score_fails_beside_one_that_has_it(model, monkeypatch):
    fake(monkeypatch, 0.5)
    load = accuracy.load_tasks

    def load_twice(settings):
        (task,) = load(settings)["tasks"].values()
        return {"tasks": {"gsm8k": task, "other": task}}

    monkeypatch.setattr(accuracy, "load_tasks", load_twice)
    result = run(model, "--min-score", "0.1")
    assert result.exit_code == 1
    assert "other has no score" in result.stdout


def test_an_answer_that_differs_fails_whatever_the_score(model, monkeypatch):
    fake(monkeypatch, 0.9, plain=(1, 3))
    result = run(model, *NGRAM, "--min-score", "0.1", "--compare-plain")
    assert result.exit_code == 1
    assert "1 of 2 answers differ from plain decoding" in result.stdout


@pytest.mark.parametrize("given", [[], ["--speculative-config", "null"]])
def test_without_speculation_there_is_nothing_to_compare(model, given):
    result = run(model, *given, "--compare-plain")
    assert result.exit_code == 2
    assert "no speculation to compare" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("gsm9k",), "lm-eval has no task gsm9k. Did you mean 'gsm8k'?"),
        (("gsm8k", "--path", "/no/such/file"), "/no/such/file"),
        (("gsm8k", "--dtype", "float8"), "dtype='float8'"),
        (("gsm8k", "--limit", "0"), "limit=0 is not possible"),
        (("gsm8k", "--min-score", "nan"), "min_score=nan is not possible. Use a number from 0 to"),
        (("gsm8k", "--min-score", "-0.1"), "min_score=-0.1 is not possible"),
        (("gsm8k", "--min-score", "50"), "min_score=50.0 is not possible"),
        (("gsm8k", "--max-tokens", "0"), "max_tokens=0 is not possible"),
        (("gsm8k", "--num-fewshot", "-1"), "num_fewshot=-1 is not possible"),
        (("gsm8k", "--num-fewshot", "9"), "num_fewshot=9 is above the 8 examples of gsm8k"),
        (
            ("gsm8k", "--metric", "exact_match"),
            "gsm8k has no metric 'exact_match'. Use 'exact_match,strict-match' or "
            "'exact_match,flexible-extract'",
        ),
    ],
)
def test_tasks_files_and_metrics_are_checked_before_the_model_loads(monkeypatch, arguments, why):
    monkeypatch.setattr(unloaded, "validate", None)
    # Reading all of lm-eval's tasks takes long.
    few = tasks.TaskManager(include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: few)
    result = invoke("eval", arguments[0], "some-model", *arguments[1:])
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr.splitlines()[-1]


def task_of(output_type, metrics):
    """A task of lm-eval with these metrics."""
    config = {
        "task": "own",
        "custom_dataset": accuracy._dataset_of([{"text": "the inner"}]),
        "output_type": output_type,
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": metric} for metric in metrics],
    }
    return tasks.TaskManager(include_defaults=False).load([config])


PERPLEXITIES = ("loglikelihood_rolling", ("word_perplexity", "bits_per_byte"))
MIXED = ("loglikelihood", ("perplexity", "acc"))


@pytest.mark.parametrize(
    ("task", "arguments", "why"),
    [
        (PERPLEXITIES, (), "'word_perplexity,none' of own"),
        (PERPLEXITIES, ("--metric", "bits_per_byte,none"), "'bits_per_byte,none' of own"),
        (MIXED, ("--metric", "perplexity,none"), "Use metric 'acc,none'"),
        (MIXED, ("--metric", "acc,none"), None),
        (MIXED, (), None),
    ],
)
def test_a_minimum_is_refused_where_lower_is_better(monkeypatch, task, arguments, why):
    """Any value of a bad model is above it."""

    def look(config, announce):
        raise ConfigError("the model was looked at")

    monkeypatch.setattr(accuracy, "load_tasks", lambda settings: task_of(*task))
    monkeypatch.setattr(unloaded.UnloadedModel, "of", look)
    asked = ["eval", "own", "some-model", "--min-score", "0.5", *arguments]
    result = invoke(*asked)
    assert (result.exit_code, result.stdout) == (2, "")
    assert (why or "the model was looked at") in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--chat", "the model has no chat template. Leave --chat out"),
        ("--max-tokens=1024", "max_tokens=1024 leaves no room for a prompt in 1024 tokens"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_it_is_loaded(
    model, tmp_path, monkeypatch, option, why
):
    monkeypatch.setattr(LLM, "from_unloaded", None)
    base = shutil.copytree(model, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    result = run(str(base), option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {why}" in result.stderr


def test_a_chat_template_that_refuses_the_questions_is_told(model, tmp_path):
    picky = shutil.copytree(model, tmp_path / "picky")
    (picky / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    result = run(str(picky), "--chat", "--limit", "1")
    assert result.exit_code == 2
    assert "error: the chat template refuses the messages: no" in result.stderr


def test_a_missing_harness_exits_with_3(model, monkeypatch):
    monkeypatch.setattr(accuracy.importlib.util, "find_spec", lambda name: None)
    result = run(model)
    assert result.exit_code == 3
    assert "pip install 'sametoken[eval]'" in result.stderr

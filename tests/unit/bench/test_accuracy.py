"""lm-eval over the engine: local questions, log-probabilities, and plain decoding beside."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch

from helpers.adapters import MLP, write_adapter
from helpers.chat_model import write_chat_model
from helpers.http_server import TOY_ENGINE
from sametoken import LLM, SamplingParams
from sametoken.bench import accuracy
from sametoken.bench.accuracy import Evaluation, TaskOptions, evaluate, load_tasks, require_harness
from sametoken.errors import ConfigError, UnsupportedError

pytest.importorskip("lm_eval", reason="lm-eval, the extra eval, is not installed")

from lm_eval import tasks
from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sametoken.bench.harness import EngineLM

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("eval")
    model = write_chat_model(folder / "model")
    adapters = {"sql": write_adapter(folder / "sql", model, MLP)}
    return LLM(str(model), **TOY_ENGINE, speculative_config=NGRAM, lora_modules=adapters)


@pytest.fixture
def questions(tmp_path):
    """Questions whose answer is what the tiny model says, and one whose answer is not."""
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"the inner {i}", "answer": f"It is so.\n#### {i}"} for i in (1, 2, 3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(llm, settings, *, plain=False):
    return evaluate(llm, load_tasks(settings), settings, plain=plain)


def instance(*arguments, kind="generate_until"):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_gsm8k_over_local_questions_scores_what_is_right(llm, questions, monkeypatch):
    def say(self, requests, disable_tqdm=False):
        self.answers += [request.args[0] for request in requests]
        return ["So it is 1. The answer is 1.", "I see 7 and then 2", "The answer is 9."]

    monkeypatch.setattr(EngineLM, "generate_until", say)
    found = run(llm, TaskOptions(("gsm8k",), questions, num_fewshot=2))
    assert found.scores["gsm8k"]["exact_match,strict-match"] == pytest.approx(1 / 3)
    assert found.score("gsm8k") == ("exact_match,flexible-extract", pytest.approx(2 / 3))
    assert found.score("gsm8k", "exact_match,strict-match")[1] == pytest.approx(1 / 3)
    # Two worked examples, then the question.
    assert found.answers[0].count("Q: ") == 3
    assert found.answers[0].endswith("Q: the inner 1\nA:")


def test_the_shipped_questions_are_asked_in_order(llm):
    found = run(llm, TaskOptions(("gsm8k",), limit=2, num_fewshot=0, max_tokens=4))
    assert [len(answer) for answer in found.answers] == [4, 4]
    assert found.num_truncated == 0


def test_answers_with_and_without_drafts_are_the_same(llm, questions):
    asked = TaskOptions(("gsm8k",), questions, num_fewshot=1, max_tokens=24)
    before = llm.speculation_metrics
    with_drafts = run(llm, asked)
    between = llm.speculation_metrics
    plain = run(llm, asked, plain=True)
    assert between.num_draft_tokens > before.num_draft_tokens
    assert llm.speculation_metrics.num_draft_tokens == between.num_draft_tokens
    assert with_drafts.answers == plain.answers
    assert with_drafts.scores == plain.scores


def test_the_adapter_that_is_named_answers(llm, questions):
    asked = TaskOptions(("gsm8k",), questions, num_fewshot=1, max_tokens=24)
    own, of_adapter = (run(llm, replace(asked, lora_request=one)) for one in (None, "sql"))
    assert own.answers != of_adapter.answers


def test_texts_stop_before_the_stop_string_and_sampling_is_as_asked(llm):
    model = EngineLM(llm)
    (text,) = model.generate_until([instance("the inner", {"until": [], "max_gen_toks": 12})], True)
    assert len(model.answers[0]) == 12
    stop = text[2:4]
    (cut,) = model.generate_until(
        [instance("the inner", {"until": stop, "max_gen_toks": 12})], True
    )
    assert cut == text[: text.index(stop)]
    sampled = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 12, "top_k": 50}
    assert model.generate_until([instance("the inner", sampled)], True) != [text]
    # Tasks that do not sample may name a temperature all the same.
    greedy = {"do_sample": False, "temperature": 5.0, "max_gen_toks": 12}
    assert model.generate_until([instance("the inner", greedy)], True) == [text]


@pytest.mark.parametrize("asked", [{"num_beams": 4}, {"diversity_penalty": 1.0}])
def test_what_the_engine_cannot_do_is_refused_by_name(llm, asked):
    with pytest.raises(UnsupportedError, match=next(iter(asked))):
        EngineLM(llm).generate_until([instance("a", asked)], True)


def test_log_probabilities_are_those_of_decoding(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    prompt = llm.get_tokenizer().encode("the inner the other")
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    said = output.outputs[0]
    expected = sum(
        entry[token].logprob for token, entry in zip(said.token_ids, said.logprobs, strict=True)
    )
    model = EngineLM(llm)
    other = (*said.token_ids[:-1], (said.token_ids[-1] + 1) % 200)
    requests = [(("", ""), prompt, list(said.token_ids)), (("", ""), prompt, list(other))]
    (score, greedy), (less, not_greedy) = model._loglikelihood_tokens(requests, disable_tqdm=True)
    assert score == pytest.approx(expected, abs=1e-4)
    assert (greedy, not_greedy) == (True, False)
    assert less < score


def test_whole_texts_are_scored_in_windows(llm, monkeypatch):
    model = EngineLM(llm)
    text = instance("the inner the other the inner", kind="loglikelihood_rolling")
    (whole,) = model.loglikelihood_rolling([text], True)
    ids = model.tok_encode("the inner the other the inner")
    (direct,) = model._loglikelihood_tokens(
        [(("", ""), [model.prefix_token_id], ids)], disable_tqdm=True
    )
    assert whole == pytest.approx(direct[0], abs=1e-4)
    # Of nine tokens one is emitted, and one is context.
    assert len(ids) > 7
    windows = map(make_disjoint_window, get_rolling_token_windows(ids, model.prefix_token_id, 7, 1))
    parts = [(("", ""), context, part) for context, part in windows]
    expected = sum(score for score, _ in model._loglikelihood_tokens(parts, disable_tqdm=True))
    monkeypatch.setattr(EngineLM, "max_length", 9)
    narrow = EngineLM(llm)
    (windowed,) = narrow.loglikelihood_rolling([text], True)
    assert windowed == pytest.approx(expected, abs=1e-4)
    assert windowed != pytest.approx(whole, abs=1e-4)
    assert narrow.num_truncated == 0


def test_a_prompt_that_is_too_long_loses_its_beginning(llm):
    model = EngineLM(llm)
    long = "the inner " * 1000
    model.generate_until([instance(long, {"max_gen_toks": 4})], True)
    assert (model.num_truncated, len(model.answers[0])) == (1, 4)
    with pytest.raises(UnsupportedError, match="leave no room"):
        model.generate_until([instance("a", {"max_gen_toks": 5000})], True)


def test_chats_go_through_the_template(llm):
    history = [{"role": "user", "content": "hi"}]
    model = EngineLM(llm)
    assert model.apply_chat_template(history).endswith("<|im_start|>assistant\n")
    begun = [*history, {"role": "assistant", "content": "So"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("So")


def test_wrong_use_is_refused(llm, tmp_path, monkeypatch):
    # Reading all of lm-eval's tasks takes long, and none of them is the one that is asked for.
    none = functools.partial(tasks.TaskManager, include_path=str(tmp_path / "none"))
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: none(include_defaults=False))
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no task nonsense_task"):
        run(llm, TaskOptions(("nonsense_task",)))
    with pytest.raises(ConfigError, match="only gsm8k"):
        TaskOptions(("hellaswag",), path=tmp_path)
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a"}')
    with pytest.raises(ConfigError, match="has no answer"):
        run(llm, TaskOptions(("gsm8k",), path))
    with pytest.raises(ConfigError, match="has no metric 'f1'"):
        Evaluation({"gsm8k": {"acc,none": 1.0}}, [], 0).score("gsm8k", "f1")


def test_a_missing_harness_names_the_extra(monkeypatch):
    monkeypatch.setattr(accuracy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"sametoken\[eval\]"):
        require_harness()

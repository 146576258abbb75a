"""Text that a target writes itself."""

from __future__ import annotations

import gzip
import json

import pytest

from helpers.clock import Clock
from helpers.training import GREEDY, open_llm, prompts_of, write_own_text
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, NumericalError, RequestError
from sametoken.train import generate
from sametoken.train.generate import TextPrompt, read_prompts, write_text
from sametoken.types.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sametoken.types.sampling_params import SamplingParams

EOS = 0


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_prompts(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_are_the_engine_s(target, tmp_path):
    answers = write_own_text(target, tmp_path / "direct.jsonl")
    asked = read_prompts(write_prompts(tmp_path / "p.jsonl", prompts_of()))
    told = []
    written = write_text(
        open_llm(target, max_num_seqs=1), asked, tmp_path / "t.jsonl", GREEDY, advance=told.append
    )
    rows = rows_of(tmp_path / "t.jsonl")
    assert [row["output_token_ids"] for row in rows] == answers
    assert [row["prompt_token_ids"] for row in rows] == [
        p["prompt_token_ids"] for p in prompts_of()
    ]
    assert written.answers == sum(told) == len(answers)
    assert written.tokens == sum(map(len, answers))
    # A few at a time, so that an end can be put to it.
    assert len(told) > 1


def test_a_prompt_s_own_temperature_and_seed_go_first(target, tmp_path):
    (prompt,) = prompts_of(1)
    asked = [prompt, prompt | {"temperature": 1.0, "seed": 5}, prompt | {"temperature": 1.0}]
    asked = read_prompts(write_prompts(tmp_path / "p.jsonl", [*asked, asked[1]]))
    write_text(open_llm(target), asked, tmp_path / "t.jsonl", GREEDY)
    greedy, one, other, again = (row["output_token_ids"] for row in rows_of(tmp_path / "t.jsonl"))
    assert one == again
    assert len({tuple(answer) for answer in (greedy, one, other)}) == 3


def test_no_answers_are_begun_after_the_time(target, tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(generate, "time", clock)
    llm = open_llm(target, max_num_seqs=1)
    asked = [TextPrompt(p["prompt_token_ids"], []) for p in prompts_of()]

    def advance(count):
        clock.now += 2

    written = write_text(llm, asked, tmp_path / "t.jsonl", GREEDY, max_seconds=1, advance=advance)
    assert written.answers == len(rows_of(tmp_path / "t.jsonl")) == 8


def test_every_kind_of_prompt_is_read(tmp_path):
    messages = [{"role": "user", "content": "b"}]
    rows = ["a", {"prompt": "b"}, {"messages": messages}, {"prompt_token_ids": [1, 2]}]
    found = read_prompts(write_prompts(tmp_path / "p.jsonl", rows))
    assert found == [
        TextPrompt(text="a"),
        TextPrompt(text="b"),
        TextPrompt(messages=messages),
        TextPrompt(token_ids=[1, 2]),
    ]


@pytest.mark.parametrize(
    ("text", "says"), [("", "no prompts"), ("3", "no prompt"), ("{}", "no prompt"), ("{", "JSON")]
)
def test_bad_prompts_are_named(tmp_path, text, says):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_prompts(tmp_path / "p.jsonl")


def test_prompts_that_the_target_cannot_answer_are_named(target, tmp_path):
    output = tmp_path / "t.jsonl"
    with pytest.raises(RequestError):
        write_text(open_llm(target), [TextPrompt([999])], output, GREEDY)
    assert not output.exists(), "a failure leaves an empty file"


def test_a_prompt_that_cannot_be_answered_is_placed_before_any_is_answered(target, tmp_path):
    path, output = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    # More than are answered at a time.
    asked = read_prompts(write_prompts(path, [*prompts_of(10), {"prompt_token_ids": [999]}]))
    with pytest.raises(RequestError, match=f"line 11 of {path} cannot be answered .*holds 999"):
        write_text(open_llm(target, max_num_seqs=1), asked, output, GREEDY)
    assert not output.exists()


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_time_in_which_nothing_can_be_done_is_refused(tmp_path, seconds):
    with pytest.raises(ConfigError, match=r"max_seconds=.* is not possible"):
        write_text(None, [TextPrompt([1])], tmp_path / "t.jsonl", GREEDY, max_seconds=seconds)


def test_an_output_that_cannot_be_written_is_found_first(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_text(None, [TextPrompt([1])], tmp_path / "no" / "t.jsonl", GREEDY)


@pytest.mark.parametrize("has_template", [False, True])
def test_a_text_is_a_message_only_where_there_is_a_template(
    scripted, tmp_path, monkeypatch, has_template
):
    llm, engine = scripted([[7], [EOS]], config=EngineConfig(max_num_seqs=1))
    hf = llm.get_tokenizer()
    template = "{% for one in messages %}<{{ one.content }}>{% endfor %}"
    # The tokenizer is shared with other tests.
    monkeypatch.setattr(hf, "chat_template", template)
    templated = tuple(llm.render_chat([{"role": "user", "content": "a"}]).token_ids)
    if not has_template:
        monkeypatch.setattr(hf, "chat_template", None)
    asked = [TextPrompt(text="a")]
    write_text(llm, asked, tmp_path / "t.jsonl", SamplingParams(max_tokens=2, temperature=0.0))
    expected = templated if has_template else tuple(hf.encode("a"))
    assert engine.requests[0].prompt_token_ids == expected
    (row,) = rows_of(tmp_path / "t.jsonl")
    assert row == {"prompt_token_ids": list(expected), "output_token_ids": [7, EOS]}


def test_answers_that_all_fail_are_an_error(scripted, tmp_path, monkeypatch):
    llm, _ = scripted([[7]], config=EngineConfig(max_num_seqs=1))
    failed = CompletionOutput(0, "", (), "error", error=NumericalError("NaN"))
    output = RequestOutput("0", None, (5,), (failed,), True, RequestMetrics(0.0))
    monkeypatch.setattr(llm, "generate", lambda prompts, params: [output])
    with pytest.raises(NumericalError):
        write_text(llm, [TextPrompt([5])], tmp_path / "t.jsonl", GREEDY)
    assert not (tmp_path / "t.jsonl").exists()


def test_answers_that_fail_are_not_counted(scripted, tmp_path, monkeypatch):
    llm, _ = scripted([[7]], config=EngineConfig(max_num_seqs=2))
    failed = CompletionOutput(0, "", (), "error", error=NumericalError("NaN"))
    whole = CompletionOutput(0, "", (7, EOS), "stop")
    outputs = [
        RequestOutput("0", None, (5,), (one,), True, RequestMetrics(0.0)) for one in (failed, whole)
    ]
    monkeypatch.setattr(llm, "generate", lambda prompts, params: outputs)
    packed = tmp_path / "t.jsonl.gz"
    written = write_text(llm, [TextPrompt([5])] * 4, packed, GREEDY)
    with gzip.open(packed, "rt") as lines:
        assert len(list(lines)) == written.answers == 1

"""Text that a target writes itself."""

from __future__ import annotations

import gzip
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.clock import Clock
from helpers.training import GREEDY, open_llm, prompts_of, write_own_text
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, NumericalError, RequestError
from sametoken.io.journal import Journal
from sametoken.train import generate
from sametoken.train.generate import TextPrompt, ask, open_answers, read_prompts, write_text
from sametoken.types.request import RequestUpdate
from sametoken.types.sampling_params import SamplingParams

EOS = 0
SHORT = SamplingParams(max_tokens=2, temperature=0.0)
FAILED = RequestUpdate("", (), 0, 0, True, 0, failed=True)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_prompts(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(llm, prompts, output, params=GREEDY, **options):
    with open_answers(output, llm.resolved.config, params) as kept:
        return write_text(llm, ask(llm.inputs, prompts, params), output, kept, **options)


def test_answers_are_the_engine_s(target, tmp_path):
    answers = write_own_text(target, tmp_path / "direct.jsonl")
    asked = read_prompts(write_prompts(tmp_path / "p.jsonl", prompts_of()))
    told = []
    llm = open_llm(target, max_num_seqs=1)
    written = answer(llm, asked, tmp_path / "t.jsonl", advance=told.append)
    rows = rows_of(tmp_path / "t.jsonl")
    assert [row["output_token_ids"] for row in rows] == answers
    assert [row["prompt_token_ids"] for row in rows] == [
        p["prompt_token_ids"] for p in prompts_of()
    ]
    assert written.answers == sum(told) == len(answers)
    assert written.tokens == sum(map(len, answers))
    assert len(told) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "direct.jsonl",
        "p.jsonl",
        "t.jsonl",
    ]


def test_a_prompt_s_own_temperature_and_seed_go_first(target, tmp_path):
    (prompt,) = prompts_of(1)
    asked = [prompt, prompt | {"temperature": 1.0, "seed": 5}, prompt | {"temperature": 1.0}]
    asked = read_prompts(write_prompts(tmp_path / "p.jsonl", [*asked, asked[1]]))
    answer(open_llm(target), asked, tmp_path / "t.jsonl")
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

    written = answer(llm, asked, tmp_path / "t.jsonl", max_seconds=1, advance=advance)
    # A few at a time, so that an end can be put to it.
    assert written.answers == len(rows_of(tmp_path / "t.jsonl")) == 8
    assert not (tmp_path / "t.jsonl.parts").exists()


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
        answer(open_llm(target), [TextPrompt([999])], output)
    assert not list(tmp_path.iterdir()), "a failure leaves a file"


def test_a_prompt_that_cannot_be_answered_is_placed_before_any_is_answered(target, tmp_path):
    path, output = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    # More than are answered at a time.
    asked = read_prompts(write_prompts(path, [*prompts_of(10), {"prompt_token_ids": [999]}]))
    with pytest.raises(RequestError, match=f"line 11 of {path} cannot be answered .*holds 999"):
        answer(open_llm(target, max_num_seqs=1), asked, output)
    assert not output.exists()


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_time_in_which_nothing_can_be_done_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"max_seconds=.* is not possible"):
        write_text(None, [], None, None, max_seconds=seconds)


def test_an_output_that_cannot_be_written_is_found_first(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        open_answers(tmp_path / "no" / "t.jsonl", EngineConfig(), GREEDY)
    assert not list(tmp_path.iterdir())


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
    answer(llm, asked, tmp_path / "t.jsonl", SHORT)
    expected = templated if has_template else tuple(hf.encode("a"))
    assert engine.requests[0].prompt_token_ids == expected
    (row,) = rows_of(tmp_path / "t.jsonl")
    assert row == {"prompt_token_ids": list(expected), "output_token_ids": [7, EOS]}


def test_answers_that_all_fail_are_an_error(scripted, tmp_path):
    llm, _ = scripted([FAILED], config=EngineConfig(max_num_seqs=1))
    with pytest.raises(NumericalError):
        answer(llm, [TextPrompt([5])], tmp_path / "t.jsonl")
    assert not list(tmp_path.iterdir())


def test_answers_that_fail_are_not_counted(scripted, tmp_path):
    llm, _ = scripted([FAILED], [[7], [EOS]], config=EngineConfig(max_num_seqs=2))
    packed = tmp_path / "t.jsonl.gz"
    written = answer(llm, [TextPrompt([5]), TextPrompt([6])], packed, SHORT)
    with gzip.open(packed, "rt") as lines:
        assert len(list(lines)) == written.answers == 1
    assert [type(error) for error in written.errors] == [NumericalError]


def interrupted(llm, prompts, output, num_answers, params=GREEDY):
    """Ctrl-C after some answers; returns how many were finished."""
    told = []

    def interrupt(count):
        told.append(count)
        if sum(told) == num_answers:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        answer(llm, prompts, output, params, advance=interrupt)
    assert not output.exists()
    return sum(told)


def test_finished_answers_outlive_an_interrupt_and_are_not_given_again(target, tmp_path):
    """In the midst of the first prompts, which are answered together."""
    asked = [TextPrompt(p["prompt_token_ids"]) for p in prompts_of()]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "t.jsonl"
    answer(open_llm(target, max_num_seqs=2), asked, whole)
    num_kept = interrupted(open_llm(target, max_num_seqs=2), asked, output, 4)
    assert 4 <= num_kept < len(asked)
    told = []
    written = answer(open_llm(target, max_num_seqs=2), asked, output, advance=told.append)
    assert (told[0], written.kept) == (num_kept, num_kept)
    assert written.answers == sum(told[1:]) == len(asked) - num_kept
    assert output.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "t.jsonl.parts").exists()


def test_finished_answers_are_on_disk_while_others_run(target, tmp_path, monkeypatch):
    """A process that is killed cannot save them."""
    monkeypatch.setattr(generate, "_KEEP_EVERY_S", 0.0)
    part, on_disk = tmp_path / "t.jsonl.parts" / "part-00000.jsonl", []
    asked = [TextPrompt(p["prompt_token_ids"]) for p in prompts_of()]

    def look(count):
        on_disk.append(part.read_bytes().count(b"\n"))

    answer(open_llm(target, max_num_seqs=2), asked, tmp_path / "t.jsonl", advance=look)
    # The first look is before any answer, each later one before its answer is kept.
    assert on_disk == [0, *range(len(asked))]


def test_answers_outlive_a_disk_that_is_full_at_the_end(target, tmp_path, monkeypatch):
    asked = [TextPrompt(p["prompt_token_ids"]) for p in prompts_of()]
    output, replace_file = tmp_path / "t.jsonl", Path.replace

    def full(path, other):
        if other == output:
            raise OSError(28, "No space left on device")
        return replace_file(path, other)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match=r"no space left .*the same command resumes the run"):
            answer(open_llm(target), asked, output)
    written = answer(open_llm(target), asked, output)
    assert (written.answers, written.kept) == (0, len(rows_of(output))) == (0, len(asked))


def test_answers_leave_their_parts_when_the_disk_has_the_file(target, tmp_path, monkeypatch):
    """A crash of the machine may lose what was not synced."""
    output, synced, remove = tmp_path / "t.jsonl", [], Journal.remove
    fsync = os.fsync

    def note(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def look(journal):
        assert {output.stat().st_ino, tmp_path.stat().st_ino} <= set(synced)
        remove(journal)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Journal, "remove", look)
    answer(open_llm(target), [TextPrompt([5])], output)
    assert not (tmp_path / "t.jsonl.parts").exists()


def test_answers_of_other_settings_are_refused_by_name(target, tmp_path):
    asked = [TextPrompt(p["prompt_token_ids"]) for p in prompts_of()]
    llm, output = open_llm(target), tmp_path / "t.jsonl"
    interrupted(llm, asked, output, 1)
    with pytest.raises(ConfigError, match="max_tokens=24, and this one has 9"):
        answer(llm, asked, output, replace(GREEDY, max_tokens=9))
    with pytest.raises(ConfigError, match="dtype='float32', and this one has 'auto'"):
        open_answers(output, replace(llm.resolved.config, dtype="auto"), GREEDY)


def test_prompts_that_failed_before_do_not_lose_the_others(scripted, tmp_path):
    """The last that is left fails again: the answers that there are become the file."""
    llm, _ = scripted([[7], [EOS]], [FAILED], [FAILED], config=EngineConfig(max_num_seqs=2))
    asked, output = [TextPrompt([5]), TextPrompt([6])], tmp_path / "t.jsonl"
    interrupted(llm, asked, output, 2, SHORT)
    written = answer(llm, asked, output, SHORT)
    assert (written.answers, written.kept) == (0, 1)
    assert len(rows_of(output)) == 1


def test_equal_prompts_of_one_seed_are_answered_once(scripted, tmp_path):
    llm, engine = scripted([[7], [EOS]], config=EngineConfig(max_num_seqs=2))
    asked, told = [TextPrompt([5], seed=3)] * 2, []
    written = answer(llm, asked, tmp_path / "t.jsonl", SHORT, advance=told.append)
    assert len(engine.requests) == 1
    assert told == [1, 1]
    one, other = rows_of(tmp_path / "t.jsonl")
    assert one == other
    assert (written.answers, written.tokens) == (2, 2)

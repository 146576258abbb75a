"""Grammars validated in processes that can be killed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from helpers.structured import EOS, VOCAB, UnusableText, tokenizer
from sametoken.errors import OverloadedError, RequestError
from sametoken.text.grammar import trials as module
from sametoken.text.grammar.grammar import GrammarCompiler
from sametoken.text.grammar.trials import ProcessTrials
from sametoken.types.structured_outputs import StructuredOutputs

# It takes minutes: the compiler's work grows with the square of its length.
BOMB = StructuredOutputs(regex="(.*.*)*" * 9000)


@pytest.fixture(scope="module")
def trials():
    trials = ProcessTrials()
    yield trials
    trials.stop()


@pytest.fixture
def compiler(trials):
    return GrammarCompiler(tokenizer(), VOCAB, (EOS,), trials)


def pids(trials: ProcessTrials) -> set[int]:
    return {process.pid for process in (*trials._idle, *trials._busy)}


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_process_is_kept_and_says_what_is_wrong(compiler, trials):
    assert compiler.compile(StructuredOutputs(regex="[a-c]")).source.text == "[a-c]"
    kept = pids(trials)
    for regex, cause in (("(a", "parenthesis"), ("(?=a)b", "lookahead")):
        with pytest.raises(RequestError, match=cause):
            compiler.compile(StructuredOutputs(regex=regex))
    assert pids(trials) == kept


def test_a_process_waits_for_the_first_grammar(compiler, trials):
    waiting = pids(trials)
    assert waiting
    assert not trials._busy
    niceness = min(os.getpriority(os.PRIO_PROCESS, pid) for pid in waiting)
    assert niceness > os.getpriority(os.PRIO_PROCESS, 0)
    compiler.compile(StructuredOutputs(regex="[a-c]{2}"))
    assert pids(trials) == waiting


def test_a_process_that_has_grown_is_replaced(compiler, trials, monkeypatch):
    compiler.compile(StructuredOutputs(regex="[a-c]{3}"))
    (process,) = trials._idle
    assert process.num_bytes() >= process.num_bytes_ready > 2**24
    monkeypatch.setattr(module, "MAX_GROWTH", -(2**40))
    compiler.compile(StructuredOutputs(regex="[a-c]{4}"))
    assert trials._idle == []
    assert ended(process.pid)


def test_no_process_is_started_once_all_are_stopped():
    trials = ProcessTrials()
    trials.stop()
    with pytest.raises(OverloadedError, match="ends"):
        GrammarCompiler(tokenizer(), VOCAB, (EOS,), trials)


def test_the_grammar_is_not_compiled_where_it_is_only_passed_on(compiler):
    assert not compiler.compile(StructuredOutputs(regex="not[0-9]here")).is_ready()


def test_one_that_takes_too_long_is_killed_and_the_next_is_served(compiler, trials, monkeypatch):
    compiler.compile(StructuredOutputs(regex="before"))
    before = pids(trials)
    monkeypatch.setattr(module, "TIME_LIMIT", 0.3)
    began = time.monotonic()
    with pytest.raises(RequestError, match="took more than"):
        compiler.compile(BOMB)
    assert time.monotonic() - began < 60
    assert all(ended(pid) for pid in before)
    monkeypatch.setattr(module, "TIME_LIMIT", 60)
    assert compiler.compile(StructuredOutputs(regex="after"))
    assert not pids(trials) & before


def test_one_that_died_while_idle_is_not_the_grammar_s_fault(compiler, trials):
    compiler.compile(StructuredOutputs(regex="third"))
    (pid,) = pids(trials)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert compiler.compile(StructuredOutputs(regex="fourth"))


def test_a_process_that_dies_costs_its_own_request(compiler, trials):
    compiler.compile(StructuredOutputs(regex="first"))
    (pid,) = pids(trials)
    timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(RequestError, match="broke the grammar compiler: SIGKILL"):
        compiler.compile(BOMB)
    timer.join()
    assert pids(trials) == set()


def test_a_process_that_cannot_start_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(module, "_MODULE", "sametoken.engine.no_module")
    trials = ProcessTrials()
    with pytest.raises(OverloadedError, match="cannot be started"):
        GrammarCompiler(tokenizer(), VOCAB, (EOS,), trials)
    assert pids(trials) == set()


def test_a_tokenizer_that_cannot_be_used_is_refused_by_the_process_that_packs_it():
    trials = ProcessTrials()
    with pytest.raises(RequestError, match="cannot use this tokenizer"):
        trials.pack(UnusableText("", VOCAB, (EOS,)))
    assert pids(trials) == set()

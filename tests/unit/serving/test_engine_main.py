"""The loop of the engine process, over an engine that emits what the test wrote down."""

from __future__ import annotations

import dataclasses
import queue
import threading
from types import SimpleNamespace

import pytest

from sametoken.errors import EngineDeadError, RequestError
from sametoken.io.child_process import Failure
from sametoken.serving.control import Control
from sametoken.serving.engine_main import EngineLoop, Preparation, StopChecker
from sametoken.serving.messages import Refused, Release, StepReport, Submit
from sametoken.types.request import EngineRequest, RequestUpdate
from sametoken.types.sampling_params import SamplingParams


class Engine:
    """Emits ``news`` step by step."""

    weights = adapters = None
    upkeep = SimpleNamespace(is_sleeping=False)
    resolved = SimpleNamespace(device=None)
    begun = ("a",)

    def __init__(self, *news) -> None:
        self.news = list(news)
        self.added: list[str] = []
        self.released: list[tuple] = []
        self.refuse = ""
        self.released_before_step: list[int] = []
        self.scheduler = SimpleNamespace(
            num_running=1, num_waiting=2, num_swapped=3, num_waiting_tokens=4, kv_usage=0.5,
            prefix_cache_queries=6, prefix_cache_hits=7, swap_usage=0.25, swapped_prefix_hits=8,
            num_preemptions=9, weight_version=10,
        )  # fmt: skip

    @property
    def has_unfinished(self) -> bool:
        return bool(self.news)

    def add_request(self, request) -> None:
        if request.request_id == self.refuse:
            raise RequestError("no room")
        self.added.append(request.request_id)

    def release(self, request_id, num_kept=None, *, aborted=False) -> None:
        self.released.append((request_id, num_kept, aborted))

    def step(self):
        self.released_before_step.append(len(self.released))
        news = self.news.pop(0)
        if isinstance(news, Exception):
            raise news
        return news


def request(name):
    return EngineRequest(name, (1, 2), SamplingParams(), 20, stop_token_ids=(0,))


def update(name, *token_ids):
    return RequestUpdate(name, token_ids, 0, 0, True, 0)


@pytest.fixture
def inbox():
    return queue.SimpleQueue()


@pytest.fixture
def start(inbox):
    def build(*news):
        engine, sent = Engine(*news), []
        control = Control(engine, inbox.put, sent.append)
        outbox = SimpleNamespace(put=sent.append)
        loop = EngineLoop(engine, outbox, Preparation(inbox.put), control)
        return engine, loop, sent

    return build


def test_an_iteration_takes_messages_steps_once_and_reports(start):
    engine, loop, sent = start((update("a", 5),), (update("a", 6),))
    loop.run_iteration([Submit((request("a"), request("b")))])
    assert engine.added == ["a", "b"]
    (report,) = sent
    assert report.updates == (update("a", 5),)
    assert report.begun == ("a",)
    assert report.step_seconds >= 0
    assert dataclasses.astuple(report.load) == (2, 1, 2, 3, 4, 0.5, 0.25, 6, 7, 8, 9, 10)
    assert loop._control.may_step


def test_without_work_messages_are_still_answered_with_the_load(start):
    engine, loop, sent = start()
    loop.run_iteration([Submit((request("a"),)), Release({"a": 5}, aborted=True)])
    assert engine.released == [("a", 5, True)]
    assert sent == [StepReport((), sent[0].load, None, 1)]


def test_an_abort_is_taken_before_the_next_step(start):
    engine, loop, _ = start((update("a", 5),), (update("a", 6),))
    loop.run_iteration([Submit((request("a"),))])
    loop.run_iteration([Release({"a": 3}, aborted=True)])
    assert engine.released_before_step == [0, 1]


def test_a_stop_token_frees_the_slot_before_the_client_has_read_it(start):
    engine, loop, _ = start((update("a", 5, 0, 6),))
    loop.run_iteration([Submit((request("a"),))])
    assert engine.released == [("a", 4, False)]
    loop.run_iteration([Release({"a": 3}), Release({"unknown": 3})])
    assert engine.released == [("a", 4, False)], "it had ended already"


def test_a_refused_prompt_leaves_nothing_behind(start):
    engine, loop, sent = start()
    engine.refuse = "c"
    loop.run_iteration([Submit((request("a"),)), Submit((request("b"), request("c")))])
    assert engine.released == [("b", None, True)]
    refused, report = sent
    assert isinstance(refused, Refused)
    assert (refused.request_ids, refused.error.cause) == (("b", "c"), "no room")
    assert refused.num_submits == report.num_submits == 2
    assert report.load.num_received == 3
    loop.run_iteration([Release({"b": 2}), Release({"a": 2})])
    assert engine.released[1:] == [("a", 2, False)]


def test_a_failed_step_ends_the_loop(start):
    _, loop, _ = start(EngineDeadError("a step failed"))
    with pytest.raises(EngineDeadError):
        loop.run_iteration([])


def test_what_the_engine_cannot_go_on_without_ends_the_loop_before_a_step(start):
    engine, loop, sent = start((update("a", 5),))
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        loop.run_iteration([Failure(EngineDeadError("rank 1 is gone"))])
    assert engine.released_before_step == []
    assert sent == []


class Grammar:
    """Compiled once ``gate`` is open."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate, self.error = threading.Event(), error

    def is_ready(self) -> bool:
        return False

    def prepare(self) -> None:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error


def structured(name, grammar):
    return dataclasses.replace(request(name), grammar=grammar)


def test_a_grammar_is_compiled_while_others_are_stepped(start, inbox):
    engine, loop, sent = start((update("a", 5),), (update("a", 6),))
    grammar = Grammar()
    loop.run_iteration([Submit((structured("g", grammar),)), Submit((request("a"),))])
    loop.run_iteration([])
    assert engine.added == ["a"]
    assert sent[-1].load.num_received == 1, "the other is on its way"
    assert sent[-1].num_submits == 2, "but its id is known"
    grammar.gate.set()
    loop.run_iteration([inbox.get(timeout=30)])
    assert engine.added == ["a", "g"]
    assert sent[-1].load.num_received == 2


def test_what_is_aborted_meanwhile_is_not_added(start, inbox):
    engine, loop, sent = start()
    grammar, other = Grammar(), Grammar()
    loop.run_iteration([Submit((structured("g", grammar), structured("h", grammar)))])
    loop.run_iteration([Release({"g": None}, aborted=True)])
    loop.run_iteration([Submit((structured("g", other),))])
    grammar.gate.set()
    loop.run_iteration([inbox.get(timeout=30)])
    assert engine.added == ["h"], "the second g has a grammar of its own"
    assert engine.released == []
    assert sent[-1].load.num_received == 2
    other.gate.set()
    loop.run_iteration([inbox.get(timeout=30)])
    assert engine.added == ["h", "g"]


@pytest.mark.parametrize("error", [RequestError("too large"), MemoryError("too large")])
def test_a_grammar_that_cannot_be_compiled_is_refused(start, inbox, error):
    engine, loop, sent = start()
    grammar = Grammar(error)
    grammar.gate.set()
    loop.run_iteration([Submit((structured("g", grammar),))])
    loop.run_iteration([inbox.get(timeout=30)])
    refused = next(one for one in sent if isinstance(one, Refused))
    assert refused.request_ids == ("g",)
    assert "too large" in str(refused.error)
    assert engine.added == []
    assert sent[-1].load.num_received == 1


def emission(*token_ids, **changes):
    return RequestUpdate("r", token_ids, max(len(token_ids) - 1, 0), 0, True, 0, **changes)


@pytest.fixture
def checker():
    checker = StopChecker()
    checker.add(EngineRequest("r", (1, 2, 3), SamplingParams(), 10, stop_token_ids=(0, 9)))
    return checker


def test_a_stop_token_ends_in_mid_window(checker):
    assert checker.check(emission(4, 5)) is None
    assert checker.check(emission(6, 9, 7)) == 7
    assert checker.check(emission(8)) is None


def test_the_length_limit_ends_in_mid_window(checker):
    assert checker.check(emission(4, 4, 4, 4, 4)) is None
    assert checker.check(emission(4, 4, 4)) == 10


def test_a_stop_token_at_the_limit_ends_once(checker):
    assert checker.check(emission(4, 4, 4, 4, 4, 4, 9)) == 10
    assert not checker.discard("r")


def test_poison_is_forgotten_since_the_scheduler_released_it(checker):
    assert checker.check(emission(failed=True)) is None
    assert not checker.discard("r")


def test_discarded_ones_are_not_watched(checker):
    assert checker.discard("r")
    assert not checker.discard("r")
    assert checker.check(emission(9)) is None

"""Measurements and their traces."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest

from helpers.bench_engine import tiny_engine, tiny_requests
from helpers.chat_model import byte_tokenizer
from helpers.checkpoints import write_config
from sametoken.bench.measure import Trace, Window, measure, token_texts
from sametoken.bench.workload import RequestSource, Workload
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.errors import NumericalError
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.request import RequestUpdate

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


class ScriptedEngine:
    """Every step takes a second; prompts take ``chunks`` steps, then each gives ``widths``."""

    def __init__(self, chunks=1, widths=(1,), lag=0, poison=False) -> None:
        self.time, self.lag, self.idle = 0.0, lag, 0
        self.chunks, self.widths, self.poison = chunks, widths, poison
        self.left: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.released: list[str] = []

    @property
    def has_unfinished(self) -> bool:
        return self.idle < self.lag

    def add_request(self, request) -> None:
        self.left[request.request_id] = self.chunks
        self.turns[request.request_id] = 0

    def release(self, request_id) -> None:
        self.released.append(request_id)
        del self.left[request_id]

    def step(self):
        self.time += 1.0
        if not self.left:
            self.idle += 1
        updates = []
        for request_id in self.left:
            self.left[request_id] -= 1
            if self.left[request_id] > 0:
                continue
            turn = self.turns[request_id]
            self.turns[request_id] += 1
            width, drafts = (self.widths[(turn - 1) % len(self.widths)], 3) if turn else (1, 0)
            counts = drafts, width - 1, True, 0
            tokens = tuple(range(width))
            updates.append(RequestUpdate(request_id, tokens, *counts, failed=self.poison))
        return tuple(updates)


def scripted(num_requests, concurrency, output_len, **script):
    engine = ScriptedEngine(**script)
    requests = RequestSource(Workload(input_len=5, output_len=output_len), 50).take(num_requests)
    run = measure(engine, requests, concurrency, clock=lambda: engine.time)
    return engine, run


def test_times_of_a_batch_that_starts_together():
    engine, run = scripted(2, 2, 4, chunks=3)
    assert [r.time_to_first_token for r in run.requests] == [3.0, 3.0]
    assert [r.time_per_output_token for r in run.requests] == [1.0, 1.0]
    assert run.seconds == 6.0
    assert sorted(engine.released) == ["bench-0", "bench-1"]


def test_decode_steps_are_those_without_a_prompt_in_them():
    _, run = scripted(2, 2, 4)
    assert [s.is_decode for s in run.steps] == [False, True, True, True]
    # The step after the prompts has another kind of step before it.
    assert [seconds for seconds, _ in run.steady_steps()] == [1.0, 1.0]


def test_a_newcomer_s_chunks_are_in_no_decode_step():
    """With three steps of prompt, a stream of two never decodes alone until its end."""
    _, run = scripted(4, 2, 3, chunks=3, widths=(1, 2, 1))
    for step in run.steps:
        assert step.num_requests == 2 or not step.is_decode or step is run.steps[-1]
    assert sum(step.num_tokens for step in run.steps) == 4 * 3


def test_at_most_so_many_run_at_once_and_all_are_run():
    _, run = scripted(5, 2, 3)
    assert run.batch == 2
    assert len(run.requests) == 5
    assert max(step.num_requests for step in run.steps) == 2
    assert [r.num_emitted for r in run.requests] == [3] * 5


def test_tokens_beyond_the_end_do_not_count():
    _, run = scripted(1, 1, 6, widths=(4,))
    assert [step.num_tokens for step in run.steps] == [1, 4, 1]
    assert run.requests[0].num_emitted == 6
    # Windows count whole: that the last token was not needed says nothing of acceptance.
    assert run.speculation.num_accepted_tokens == 6
    assert run.speculation.metrics().acceptance_length == 4.0


def test_context_is_what_was_committed_before_the_step():
    _, run = scripted(2, 2, 4, widths=(2, 1))
    assert [step.context for step in run.steps] == [2 * 5, 2 * 6, 2 * 8]


def test_one_token_has_no_time_per_later_token():
    _, run = scripted(1, 1, 1)
    assert run.requests[0].time_per_output_token is None
    assert run.steady_steps() == []


def test_steps_left_in_flight_are_settled_and_not_counted():
    engine, run = scripted(1, 1, 2, lag=2)
    assert not engine.has_unfinished
    assert run.seconds == 2.0


def test_nan_ends_the_measurement():
    with pytest.raises(NumericalError, match="bench-0"):
        scripted(1, 1, 2, poison=True)


@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize("speculation", [None, NGRAM])
def test_a_real_engine_runs_every_request_to_its_end(tmp_path, steps_in_flight, speculation):
    config = EngineConfig.from_options(
        model=str(write_config(tmp_path, max_position_embeddings=256)),
        load_format="dummy",
        steps_in_flight=steps_in_flight,
        speculative_config=speculation,
        prefill_chunk_size=16,
        max_num_seqs=4,
    )
    engine = build_engine(config)
    workload = Workload(input_len=40, output_len=24)
    for concurrency in (1, 3):
        requests = RequestSource(workload, 23).take(5)
        num_done = itertools.count()
        run = measure(engine, requests, concurrency, advance=functools.partial(next, num_done))
        assert next(num_done) == 5
        assert [r.num_emitted for r in run.requests] == [24] * 5
        assert not engine.has_unfinished
        assert all(r.arrival < r.first <= r.last for r in run.requests)
        assert run.steady_steps()
        assert (run.speculation.num_draft_tokens > 0) == (speculation is not None)


def test_windows_follow_one_another():
    trace = Trace("a")
    trace.add((1,), 0, 0)
    trace.add((2, 3, 4), 3, 2)
    trace.add((5,), 3, 0)
    assert trace.windows == [Window(0, 0, 0), Window(1, 3, 2), Window(4, 3, 0)]
    assert trace.as_json(None)["texts"] == ["1 ", "2 ", "3 ", "4 ", "5 "]


def test_texts_of_tokens_add_up_where_a_character_has_several():
    hf = SimpleNamespace(backend_tokenizer=byte_tokenizer(), added_tokens_decoder={})
    tokenizer = Tokenizer(hf)
    text = "the é 漢 end"
    ids = tokenizer.backend.encode(text).ids
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids) > len(text) - 2
    assert "".join(texts) == text
    assert token_texts([], tokenizer) == []
    # The first byte of a character whose others never come is not lost.
    assert token_texts(tokenizer.backend.encode("é").ids[:1], tokenizer) == ["\ufffd"]


def test_measured_windows_are_those_of_the_engine(tmp_path):
    engine, vocab_size = tiny_engine(tmp_path, num_speculative_tokens=3)
    run = measure(engine, tiny_requests(vocab_size, 3, output_len=20), 2, num_traced=2)
    first, second, untraced = run.requests
    assert untraced.trace is None
    for record in (first, second):
        trace = record.trace
        assert len(trace.token_ids) == record.num_emitted == 20
        assert trace.windows[0] == Window(0, 0, 0)
        ends = [window.first + window.num_accepted + 1 for window in trace.windows]
        assert ends[:-1] == [window.first for window in trace.windows[1:]]
        # The last window may reach beyond the answer's length, which is cut there.
        assert ends[-1] >= 20
    offered = sum(window.num_drafts for r in (first, second) for window in r.trace.windows)
    assert 0 < offered <= run.speculation.num_draft_tokens

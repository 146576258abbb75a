"""Traces: windows in order, and texts of tokens that add up to the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.bench_engine import tiny_engine, tiny_requests
from helpers.chat_model import byte_tokenizer
from sametoken.bench.measure import Trace, Window, measure, token_texts
from sametoken.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer():
    backend = byte_tokenizer()
    hf = SimpleNamespace(backend_tokenizer=backend, added_tokens_decoder={})
    return Tokenizer(hf)


def test_windows_follow_one_another():
    trace = Trace("a")
    trace.add((1,), 0, 0)
    trace.add((2, 3, 4), 3, 2)
    trace.add((5,), 3, 0)
    assert trace.windows == [Window(0, 0, 0), Window(1, 3, 2), Window(4, 3, 0)]
    assert trace.as_json(None)["texts"] == ["1 ", "2 ", "3 ", "4 ", "5 "]


def test_texts_of_tokens_add_up_where_a_character_has_several(tokenizer):
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

"""A follower's new weights: one copy at a time beside those in use."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sametoken.engine.shared_weights import (
    FollowingWeights,
    LoadFactors,
    LoadShare,
    ShareLoaded,
    UseFactors,
    UseShare,
    _in_memory,
    adapter_in_memory,
    agreed,
)
from sametoken.engine.weights import NewWeights
from sametoken.errors import CheckpointError
from sametoken.models.in_place import Replacement
from sametoken.models.load.adapter import AdapterConfig, StoredAdapter
from sametoken.models.load.sent import SentTensors


class SlowWeights:
    """Loads until it may end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def load(self, source, target: str) -> NewWeights:
        self.begun.release()
        assert self.may_end.wait(60)
        (sent,) = source.chunks("w")
        return NewWeights(Replacement(((self.live, sent),)), of_target=True)


def test_an_update_is_not_loaded_beside_an_interrupted_one():
    own, sent, live = SlowWeights(), queue.SimpleQueue(), torch.zeros(2)
    own.live = live
    following = FollowingWeights(own, None, torch.device("cpu"), sent.put)
    kept, updates = zip(
        *(_in_memory(SentTensors([("w", torch.full((2,), float(n)))])) for n in range(2)),
        strict=True,
    )
    first, second = (replace(one, number=n) for n, one in enumerate(updates))
    following.begin(first)
    assert own.begun.acquire(timeout=60)
    assert following.begin(UseShare(write=False)) is None
    following.begin(second)
    assert not own.begun.acquire(timeout=0.3)
    own.may_end.set()
    assert [sent.get(timeout=60) for _ in kept] == [ShareLoaded(n, None) for n in range(2)]
    following.begin(UseShare(write=True))()
    assert live.tolist() == [1, 1]
    # No adapter is written where weights were loaded.
    following.begin(first)
    assert sent.get(timeout=60) == ShareLoaded(0, None)
    assert following.begin(UseFactors(1)) is None


class InChunks(SentTensors):
    """A tensor that is read row by row, as large ones are."""

    def stored_chunks(self, name):
        for whole in super().stored_chunks(name):
            yield from whole.split(1)


def test_tensors_of_several_chunks_are_shared_whole():
    sent = [(name, torch.randn(3, 5)) for name in "ab"]
    _kept, shared = _in_memory(InChunks(sent))
    source = shared.source()
    for name, tensor in sent:
        assert torch.equal(torch.cat(list(source.chunks(name))), tensor)


def test_what_one_rank_refuses_no_rank_keeps():
    refusal = CheckpointError("one is cut off", "give another")
    told = []

    def collect(kind, is_wanted):
        answers = [ShareLoaded(told[0].number, error) for error in (None, refusal)]
        return [answer for answer in answers if is_wanted(answer)]

    ranks = SimpleNamespace(tell=told.append, collect=collect)
    share = LoadShare(0, "", 0, ())
    with (
        pytest.raises(CheckpointError, match="cut off"),
        agreed(ranks, lambda number: replace(share, number=number)),
    ):
        pass
    assert told == [replace(share, number=told[0].number), UseShare(write=False)]


def test_an_adapter_is_written_to_its_place_and_none_after_weights():
    written, sent = [], queue.SimpleQueue()

    def load(stored: StoredAdapter, number: int):
        if stored.location == "bad":
            raise CheckpointError("bad", "give another")
        read = torch.cat(list(stored.tensors.chunks("w"))).tolist()
        return lambda place: written.append((number, read, place))

    following = FollowingWeights(SlowWeights(), load, torch.device("cpu"), sent.put)
    for number, path in enumerate(("./a", "bad", "./b")):
        tensors = SentTensors([("w", torch.full((2,), float(number)))])
        _kept, shared = adapter_in_memory(
            StoredAdapter(path, AdapterConfig(4, 8.0, (), (), by_root=False), tensors)
        )
        assert following.begin(LoadFactors(number, 5 + number, shared)) is None
        error = sent.get(timeout=60).error
        assert (error is None) == (path != "bad")
        # Weights are not written where an adapter was loaded, and none where it was refused.
        if number < 2:
            assert following.begin(UseShare(write=True)) is None
    following.begin(UseFactors(2))()
    assert written == [(7, [2.0, 2.0], 2)]

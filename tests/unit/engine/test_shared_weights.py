"""A follower's new weights: one copy at a time beside those in use."""

from __future__ import annotations

import queue
import threading

import torch

from sametoken.engine.shared_weights import (
    FollowingWeights,
    ShareLoaded,
    UseShare,
    _in_memory,
)
from sametoken.engine.weights import NewWeights
from sametoken.models.in_place import Replacement
from sametoken.models.load.sent import SentTensors


class SlowWeights:
    """Loads until it may end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def load(self, source, target: str) -> NewWeights:
        self.begun.release()
        assert self.may_end.wait(60)
        (sent,) = source.chunks("w")
        return NewWeights(Replacement(((torch.empty(2), sent),)), of_target=True)


def test_an_update_is_not_loaded_beside_an_interrupted_one():
    own, sent = SlowWeights(), queue.SimpleQueue()
    following = FollowingWeights(own, torch.device("cpu"), sent.put)
    updates = [_in_memory(SentTensors([("w", torch.full((2,), float(n)))]), n) for n in range(2)]
    following.begin(updates[0][1])
    assert own.begun.acquire(timeout=60)
    assert following.begin(UseShare(write=False)) is None
    following.begin(updates[1][1])
    assert not own.begun.acquire(timeout=0.3)
    own.may_end.set()
    assert [sent.get(timeout=60) for _ in updates] == [ShareLoaded(n, None) for n in range(2)]
    replacement = following.begin(UseShare(write=True))
    assert replacement.pairs[0][1].tolist() == [1, 1]

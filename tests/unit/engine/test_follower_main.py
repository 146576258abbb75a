"""What a follower does with messages, between plans too."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from types import SimpleNamespace

import torch

from sametoken.engine import follower_main
from sametoken.engine.follower_main import FollowingRank
from sametoken.models.in_place import Replacement

PATIENCE_S = 20.0


def test_weights_that_were_written_are_held_by_nobody(monkeypatch):
    in_use, inbox = torch.zeros(3), queue.SimpleQueue()
    new = torch.ones(3)
    written, replacement = weakref.ref(new), Replacement(((in_use, new),))
    del new
    following = SimpleNamespace(begin=lambda message: message.pop())
    monkeypatch.setattr(follower_main, "FollowingWeights", lambda *given: following)
    rank = FollowingRank.__new__(FollowingRank)
    rank._messages, rank._device = iter(inbox.get, None), torch.device("cpu")
    monkeypatch.setattr(rank, "send", lambda message: None)
    threading.Thread(target=rank.follow, args=(None, None, None), daemon=True).start()
    inbox.put([replacement.write])
    del replacement
    deadline = time.monotonic() + PATIENCE_S
    while written() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert in_use.tolist() == [1, 1, 1]
    assert written() is None

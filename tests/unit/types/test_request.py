"""Messages between processes."""

from __future__ import annotations

import dataclasses
import pickle

from sametoken.types.request import RequestUpdate
from sametoken.types.structured_outputs import MaskFault


def test_an_update_travels_whole():
    """It is pickled by position; no two fields here have one value."""
    sent = RequestUpdate("one", (5, 6), 3, 1, True, 2, False, MaskFault.SLOW, (), ((),), (7, 8))
    assert pickle.loads(pickle.dumps(sent)) == sent
    _, values = sent.__reduce__()
    assert values == tuple(getattr(sent, one.name) for one in dataclasses.fields(sent))

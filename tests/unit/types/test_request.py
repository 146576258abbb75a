"""Messages between processes."""

from __future__ import annotations

import pickle

from sametoken.types.request import RequestUpdate
from sametoken.types.structured_outputs import MaskFault


def test_an_update_travels_whole():
    sent = RequestUpdate(
        "one", (5, 6), 3, 1, True, 2, (7, 8), (), ((),), None, True, MaskFault.SLOW
    )
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is RequestUpdate
    assert received == sent

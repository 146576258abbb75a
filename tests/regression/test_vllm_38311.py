"""vllm#38311: draft steps after the first ran with the attention metadata of an earlier step.

There a captured graph of the drafter kept the lengths and addresses it was captured with. No
token changed; drafts after the first were accepted less often. Here every row's position and
address is derived in the step that uses it, in a graph as without one.
"""

from __future__ import annotations

import pytest

from helpers.spoilt import measure
from helpers.twin import Twin, twin_requests

pytestmark = pytest.mark.usefixtures("layouts")

K = 5


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_every_draft_position_is_accepted(tmp_path, steps_in_flight):
    """Steps of equal shapes follow each other, so a stale row would fit."""
    twin, items = Twin(tmp_path), twin_requests()
    core = twin.engine(K, steps_in_flight=steps_in_flight)
    total = measure(core, items, plain=twin.plain(items))
    assert all(total.offered_per_position)
    assert total.accepted_per_position == total.offered_per_position

"""tokenspeed#318: a drafter's sequence lengths, trimmed in place or not trimmed at all.

There each model's drafter took the rejected drafts off a length that others read too: some
twice, some never. A module for multi-token prediction then attended to rejected rows, or
missed rows that were accepted; only its acceptance fell. Here a drafter is given committed
lengths, and nothing can be trimmed.
"""

from __future__ import annotations

import pytest

from helpers.harness import run
from helpers.spoilt import measure_spoilt
from helpers.twin import Twin, twin_requests

pytestmark = pytest.mark.usefixtures("layouts")


@pytest.mark.parametrize("k", [1, 4])
def test_rejected_drafts_leave_nothing_in_the_module_s_rows(tmp_path, k):
    """Windows that are cut at every place, then the same tokens as without drafts."""
    twin = Twin(tmp_path)
    measure_spoilt(twin.engine(k, spoil=True), twin_requests(), k)
    items = twin_requests()
    assert run(twin.engine(k, spoil=True), items).tokens == twin.plain(items)

"""tokenspeed#318: a drafter's sequence lengths, trimmed in place or not trimmed at all.

There each model's drafter took the rejected drafts off a length that others read too: some
twice, some never. A module for multi-token prediction then attended to rejected rows, or
missed rows that were accepted; only its acceptance fell. The modules of Qwen3.5 and of DeepSeek
(NextN) are tested here. A drafter is given committed lengths, and nothing can be trimmed.
"""

from __future__ import annotations

import pytest

from helpers.spoilt import measure_spoilt
from helpers.twin import NextNTwin, Twin, nextn_requests, twin_requests

pytestmark = pytest.mark.usefixtures("layouts")


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(
    ("make", "requests"),
    [(Twin, twin_requests), (NextNTwin, nextn_requests)],
    ids=["qwen3_5", "deepseek"],
)
def test_rejected_drafts_leave_nothing_in_the_module_s_rows(tmp_path, make, requests, k):
    """Windows that are cut at every place, and the same tokens as without drafts."""
    twin, items = make(tmp_path), requests()
    measure_spoilt(twin.engine(k, spoil=True), items, k, twin.plain(items))

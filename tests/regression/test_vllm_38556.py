"""vllm#38556: a host copy of results read while it is in flight, after the rows have moved.

There the counts of accepted drafts were still on their way to the host when a batch was
compacted: rows that moved took stale counts along, and the recurrent state of a hybrid was
advanced by them. Here rows never move, each step in flight has a buffer of its own, and a
buffer that has not landed cannot be read.
"""

from __future__ import annotations

import pytest

from helpers.harness import run
from helpers.nemotron import write_twin
from helpers.trained import MTP, plain, text_requests, trained
from helpers.twin import Twin, twin_requests, write_qwen
from sametoken.models.names import NEMOTRON_NAME

pytestmark = pytest.mark.usefixtures("layouts")


@pytest.mark.parametrize(
    ("write", "k", "device"),
    [(write_qwen, 3, "late"), (write_qwen, 3, "ahead"), (write_twin, 5, "ahead")],
    ids=["late", "ahead", "nemotron"],
)
def test_requests_come_and_go_while_results_are_on_their_way(tmp_path, write, k, device):
    """Six requests of uneven lengths over three slots of a hybrid, three steps in flight."""
    twin = Twin(tmp_path, write=write)
    items = twin_requests(max_tokens=19)
    drafted = run(twin.engine(k, steps_in_flight=3, spoil=True, device=device), items)
    assert drafted.tokens == twin.plain(items)
    assert 0 < drafted.accepted < drafted.offered


def test_so_they_do_over_a_trained_nemotron():
    items = text_requests(NEMOTRON_NAME)
    drafted = run(trained(NEMOTRON_NAME, MTP, device="ahead", steps_in_flight=3), items)
    assert drafted.tokens == plain(NEMOTRON_NAME).tokens
    assert drafted.accepted > 0.55 * drafted.offered

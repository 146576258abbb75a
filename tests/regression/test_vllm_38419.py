"""vllm#38419: the token that a drafter goes on from, read at an optimistic length.

There steps in flight made the host count drafts as accepted before they were verified. The
length that came of it said where to read the drafter's next token, and what it read was no
token at all. Here the drafter reads the committed token at ``end`` on the device; the host
indexes nothing above its lower bound.
"""

from __future__ import annotations

import pytest

from helpers.harness import run
from helpers.nemotron import write_twin
from helpers.spoilt import measure_spoilt
from helpers.trained import MTP, plain, text_requests, trained
from helpers.twin import Twin, twin_requests, write_qwen
from sametoken.models.names import NEMOTRON_NAME

pytestmark = pytest.mark.usefixtures("layouts")


@pytest.mark.parametrize(
    ("write", "k", "steps_in_flight"),
    [(write_qwen, 3, 2), (write_qwen, 3, 3), (write_twin, 5, 3)],
    ids=["2", "3", "nemotron"],
)
def test_a_draft_chain_goes_on_from_the_committed_token(tmp_path, write, k, steps_in_flight):
    """Windows cut short, chunks that end inside a prompt; it was met on Nemotron, with 5 drafts."""
    core = Twin(tmp_path, write=write).engine(k, steps_in_flight=steps_in_flight, spoil=True)
    measure_spoilt(core, twin_requests(), k)


@pytest.mark.parametrize("steps_in_flight", [2, 3])
def test_so_does_that_of_a_trained_nemotron(steps_in_flight):
    """Real text in chunks that end inside prompts; of random drafts one in 8192 is right."""
    items = text_requests(NEMOTRON_NAME)
    drafted = run(trained(NEMOTRON_NAME, MTP, steps_in_flight=steps_in_flight), items)
    assert drafted.tokens == plain(NEMOTRON_NAME).tokens
    assert drafted.accepted > 0.55 * drafted.offered

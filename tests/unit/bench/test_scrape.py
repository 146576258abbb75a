"""Counters of ours and of vLLM's, before and after."""

from __future__ import annotations

import httpx
import pytest

from sametoken.bench.scrape import Counters, parse_counters, scrape

VLLM = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1"}} 10.0
vllm:spec_decode_num_drafts_created{{engine="0"}} 1.7e9
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
# TYPE other_things counter
other_things_total 5.0
"""
OURS = """\
# TYPE sametoken:spec_decode_num_drafts_total counter
sametoken:spec_decode_num_drafts_total{model_name="m"} 10.0
# TYPE sametoken:spec_decode_num_draft_tokens_total counter
sametoken:spec_decode_num_draft_tokens_total{model_name="m"} 15.0
# TYPE sametoken:spec_decode_num_accepted_tokens_total counter
sametoken:spec_decode_num_accepted_tokens_total{model_name="m"} 8.0
# TYPE sametoken:spec_decode_num_accepted_tokens_per_pos_total counter
sametoken:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 6.0
sametoken:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2.0
# TYPE sametoken:spec_decode_num_draft_tokens_per_pos_total counter
sametoken:spec_decode_num_draft_tokens_per_pos_total{position="0"} 10.0
sametoken:spec_decode_num_draft_tokens_per_pos_total{position="1"} 5.0
"""


def vllm(drafts, drafted, accepted, first, second):
    given = {"drafts": drafts, "drafted": drafted, "accepted": accepted}
    return parse_counters(VLLM.format(**given, first=first, second=second))


def test_a_difference_of_vllms_counters_by_its_definitions():
    delta = vllm(50, 100, 45, 30, 15).since(vllm(10, 20, 5, 5, 0))
    assert delta.totals["spec_decode_num_drafts_total"] == 40
    found = delta.speculation()
    assert found["acceptance_length"] == pytest.approx(1 + 40 / 40)
    assert found["acceptance_rate"] == pytest.approx(40 / 80)
    assert found["acceptance_per_position"] == pytest.approx([25 / 40, 15 / 40])
    assert not delta.went_back


def test_ours_are_over_the_drafts_offered_at_each_position():
    assert parse_counters(OURS).speculation()["acceptance_per_position"] == [0.6, 0.4]


def test_the_length_is_over_steps_where_a_server_counts_them():
    """Also those without drafts, as everywhere; vLLM counts windows with drafts alone."""
    steps = 'sametoken:spec_decode_num_steps_total{model_name="m"} 16.0\n'
    steps = f"# TYPE sametoken:spec_decode_num_steps_total counter\n{steps}"
    found = parse_counters(OURS + steps).speculation()
    assert (found["num_steps"], found["acceptance_length"]) == (16, 1.5)
    assert found["acceptance_per_position"] == [0.6, 0.4]


def test_a_server_that_was_started_again_is_noticed():
    assert vllm(5, 10, 1, 1, 0).since(vllm(50, 100, 45, 30, 15)).went_back


def test_no_drafts_no_acceptance():
    assert Counters().speculation() is None
    assert vllm(5, 10, 1, 1, 0).since(vllm(5, 10, 1, 1, 0)).speculation() is None


def test_runs_add_up():
    both = parse_counters(OURS) + parse_counters(OURS)
    assert both.speculation()["num_draft_tokens"] == 30
    assert both.positions["spec_decode_num_accepted_tokens_per_pos_total"] == {0: 12.0, 1: 4.0}


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, ""),
        (200, "no metric { at all"),
        (200, "# TYPE vllm:steps counter\nvllm:steps_total NaN\n"),
        (200, "# TYPE vllm:steps counter\nvllm:steps_total +Inf\n"),
    ],
)
async def test_no_counters_where_there_are_none(status, body):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert await scrape(client) is None

"""Which rows a step has: chunks, drafts, the row budget, and whose turn it is."""

import dataclasses

import pytest

from sametoken.core.outputs import StepResult
from sametoken.errors import InvariantError


def test_nothing_to_do_is_no_plan(kit):
    scheduler = kit.scheduler()
    assert scheduler.plan() is None
    assert not scheduler.has_unfinished


def test_a_prompt_runs_in_chunks_on_the_grid_and_the_last_one_samples(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("r", 19))
    plans = [scheduler.plan() for _ in range(4)]
    assert [kit.rows(plan) for plan in plans] == [
        [(0, 8, 0, False)],
        [(0, 8, 0, False)],
        [(0, 3, 0, True)],
        [(0, 1, 0, True)],
    ]
    assert [plan.step_id for plan in plans] == [0, 1, 2, 3]
    assert [len(plan.admissions) for plan in plans] == [1, 0, 0, 0]
    assert plans[0].admissions[0].num_cached == 0


def test_a_chunk_that_does_not_fit_waits_whole(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=13)
    scheduler.add(kit.request("a", 16))
    scheduler.add(kit.request("b", 7))
    # 8 rows of a leave 5, too few for the 7 of b.
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 8, 0, False)]
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 8, 0, True)]
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 0, True), (1, 7, 0, True)]


def test_chunks_of_several_requests_share_a_step(kit):
    scheduler = kit.scheduler()
    for name in "abc":
        scheduler.add(kit.request(name, 5))
    assert kit.rows(scheduler.plan()) == [(0, 5, 0, True), (1, 5, 0, True), (2, 5, 0, True)]


def test_admission_is_first_come_first_served(kit):
    scheduler = kit.scheduler(max_num_seqs=1)
    for name in "abc":
        scheduler.add(kit.request(name, 3, max_total=4))
    served = []
    for _ in range(3):
        _, updates = kit.step(scheduler)
        served.append(updates[0].request_id)
        scheduler.release(updates[0].request_id)
    assert served == ["a", "b", "c"]


def test_steps_in_flight_widen_the_bound_and_stop_at_the_length_limit(kit):
    scheduler = kit.scheduler(num_speculative_tokens=4)
    scheduler.add(kit.request("r", 3, max_total=12))
    plans = [scheduler.plan() for _ in range(3)]
    # hi: 4 after the prompt, 9 after a full window; 12 - 9 - 1 drafts are left.
    assert [row.draft_limit for plan in plans for row in plan.rows] == [0, 4, 2]
    assert scheduler.plan() is None
    scheduler.settle(kit.result(plans[0]))
    assert scheduler.plan() is None
    # One token came where five might have: there is room again.
    scheduler.settle(kit.result(plans[1], accept=0))
    assert [row.draft_limit for row in scheduler.plan().rows] == [3]


def test_the_last_token_has_no_drafts(kit):
    scheduler = kit.scheduler(num_speculative_tokens=4)
    scheduler.add(kit.request("r", 3, max_total=5))
    kit.step(scheduler)
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 0, True)]
    assert scheduler.plan() is None


@pytest.mark.parametrize(("own", "expected"), [(None, 4), (2, 2), (0, 0), (9, 4)])
def test_a_request_has_its_own_limit_on_drafts(kit, own, expected):
    scheduler = kit.scheduler(num_speculative_tokens=4)
    scheduler.add(kit.request("r", 3, max_total=30, max_drafts=own))
    kit.step(scheduler)
    assert kit.rows(scheduler.plan()) == [(0, 1, expected, True)]


def test_every_decode_gets_a_row_before_any_gets_drafts(kit):
    scheduler = kit.scheduler(
        max_num_batched_tokens=9, num_speculative_tokens=4, prefill_chunk_size=4
    )
    for name in "abc":
        scheduler.add(kit.request(name, 3, max_total=30))
    kit.step(scheduler)
    plan, _ = kit.step(scheduler)
    assert kit.rows(plan) == [(0, 1, 2, True), (1, 1, 2, True), (2, 1, 2, True)]


def test_drafts_that_one_cannot_use_go_to_the_others(kit):
    scheduler = kit.scheduler(
        max_num_batched_tokens=9, num_speculative_tokens=4, prefill_chunk_size=4
    )
    for name, own in (("a", 0), ("b", None), ("c", 1)):
        scheduler.add(kit.request(name, 3, max_total=30, max_drafts=own))
    kit.step(scheduler)
    plan, _ = kit.step(scheduler)
    assert [row.draft_limit for row in plan.rows] == [0, 3, 1]


def test_decodes_take_turns_when_not_all_fit(kit):
    scheduler = kit.scheduler(
        max_num_seqs=5, max_num_batched_tokens=2, prefill_chunk_size=2, num_speculative_tokens=3
    )
    for name in "abcde":
        scheduler.add(kit.request(name, 2, max_total=40))
    while scheduler.num_waiting:
        kit.step(scheduler)
    steps = [[row.slot for row in kit.step(scheduler)[0].rows] for _ in range(12)]
    assert all(len(slots) == 2 for slots in steps)
    # Five requests, two rows: each is served once in any three steps.
    for start in range(10):
        assert {slot for slots in steps[start : start + 3] for slot in slots} == {0, 1, 2, 3, 4}


def test_prefill_advances_beside_a_full_load_of_decodes(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=10, num_speculative_tokens=8)
    for name in "abc":
        scheduler.add(kit.request(name, 3, max_total=60))
    while scheduler.num_waiting:
        kit.step(scheduler)
    scheduler.add(kit.request("long", 24, max_total=30))
    plans = [kit.step(scheduler)[0] for _ in range(3)]
    for plan in plans:
        assert (3, 8) in [(row.slot, row.num_query) for row in plan.rows]
    # Two rows are left beside a chunk: each of the three decodes is served in any two steps.
    decodes = [[row.slot for row in plan.rows if row.slot != 3] for plan in plans]
    assert [len(slots) for slots in decodes] == [2, 2, 2]
    assert {*decodes[0], *decodes[1]} == {*decodes[1], *decodes[2]} == {0, 1, 2}


def test_a_chunk_that_fills_the_step_alternates_with_decoding(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=8)
    scheduler.add(kit.request("short", 3, max_total=30))
    kit.step(scheduler)
    scheduler.add(kit.request("long", 24, max_total=30))
    slots = [[row.slot for row in kit.step(scheduler)[0].rows] for _ in range(6)]
    assert slots == [[1], [0], [1], [0], [1], [0, 1]]


def test_a_stream_of_prompts_does_not_starve_decoding(kit):
    scheduler = kit.scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(kit.request("first", 3, max_total=30))
    kit.step(scheduler)
    turns = 0
    for count in range(20):
        name = f"prompt {count}"
        if scheduler.num_running + scheduler.num_waiting < 2:
            scheduler.add(kit.request(name, 8, max_total=9))
        plan, updates = kit.step(scheduler)
        turns += any(row.slot == 0 for row in plan.rows)
        for update in updates:
            if update.request_id != "first":
                scheduler.release(update.request_id)
    assert turns >= 10


def test_the_update_carries_the_verdict(kit):
    scheduler = kit.scheduler(num_speculative_tokens=3)
    scheduler.add(kit.request("r", 12, max_total=30))
    assert kit.step(scheduler)[1] == ()
    [first] = kit.step(scheduler)[1]
    assert (first.token_ids, first.samples, first.num_cached) == ((7,), True, 0)
    [second] = kit.step(scheduler, accept=2)[1]
    assert (second.num_drafts, second.num_accepted, second.token_ids) == (3, 2, (7, 7, 7))


def test_prompt_logprobs_of_a_chunk_make_an_update(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("r", 12, prompt_logprobs=0))
    plan = scheduler.plan()
    entry = {3: None}
    row = dataclasses.replace(kit.result(plan).rows[0], prompt_logprobs=(entry,))
    [update] = scheduler.settle(StepResult(plan.step_id, (row,)))
    assert update.token_ids == ()
    assert not update.samples
    assert update.prompt_logprobs == (entry,)


def test_results_are_settled_in_step_order(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("r", 12))
    first, second = scheduler.plan(), scheduler.plan()
    with pytest.raises(InvariantError, match="result of step 1 arrived, expected 0"):
        scheduler.settle(kit.result(second))
    scheduler.settle(kit.result(first))
    with pytest.raises(InvariantError, match="result of step 0 arrived, expected 1"):
        scheduler.settle(kit.result(first))
    scheduler.settle(kit.result(second))
    with pytest.raises(InvariantError, match="expected none"):
        scheduler.settle(kit.result(second))


def test_a_verdict_that_the_row_cannot_have_is_refused(kit):
    scheduler = kit.scheduler(num_speculative_tokens=2)
    scheduler.add(kit.request("r", 3))
    kit.step(scheduler)
    plan = scheduler.plan()
    good = kit.result(plan).rows[0]
    with pytest.raises(InvariantError, match="has 0 rows, its plan 1"):
        scheduler.settle(StepResult(plan.step_id, ()))
    bad = dataclasses.replace(good, num_drafts=3)
    with pytest.raises(InvariantError, match="0 of 3 drafts where at most 2"):
        scheduler.settle(StepResult(plan.step_id, (bad,)))


def test_a_missing_token_is_refused(kit):
    scheduler = kit.scheduler(num_speculative_tokens=2)
    scheduler.add(kit.request("r", 3))
    kit.step(scheduler)
    plan = scheduler.plan()
    bad = dataclasses.replace(kit.result(plan, accept=2).rows[0], token_ids=(7, 7))
    with pytest.raises(InvariantError, match="emitted 2 tokens, expected 3"):
        scheduler.settle(StepResult(plan.step_id, (bad,)))


def test_equal_calls_give_equal_plans(kit):
    def run():
        scheduler = kit.scheduler(num_blocks=8, num_speculative_tokens=2)
        for name in "abcd":
            scheduler.add(kit.request(name, 6, max_total=20))
        return [kit.step(scheduler, accept=1)[0] for _ in range(8)]

    assert run() == run()

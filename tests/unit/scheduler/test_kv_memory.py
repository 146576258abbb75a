"""Who holds which block and slot: assignment, sharing, preemption, release."""

from __future__ import annotations

import pytest

from sametoken.errors import InvariantError
from sametoken.scheduler.plan_draft import PlanDraft
from sametoken.scheduler.request_state import Status
from sametoken.scheduler.swap_space import Found
from sametoken.types.fast_prompts import FastForm

PROMPT = tuple(range(100, 113))  # three full blocks of 4, and one token


def planned_blocks(plan, slot):
    found = [a.block_ids for a in plan.block_assignments if a.slot == slot]
    return [block for blocks in found for block in blocks]


def test_blocks_cover_the_upper_bound_and_the_lookahead(kit):
    scheduler = kit.scheduler(num_speculative_tokens=4, lookahead_slots=3)
    scheduler.add(kit.request("r", 8, max_total=40))
    plans = [scheduler.plan() for _ in range(3)]
    assigned = [[(a.first_index, len(a.block_ids)) for a in p.block_assignments] for p in plans]
    # The chunk: 8 + 1 + 3 positions; then hi = 14 and 19, and 3 more.
    assert assigned == [[(0, 3)], [(3, 2)], [(5, 1)]]


def test_a_chunk_inside_the_prompt_has_room_for_one_more_and_the_lookahead(kit):
    scheduler = kit.scheduler(lookahead_slots=4, max_num_batched_tokens=8)
    scheduler.add(kit.request("r", 20))
    assert len(planned_blocks(scheduler.plan(), 0)) == 4  # 8 + 1 + 4 positions


def test_a_prefix_is_shared_from_the_plan_after_the_one_that_computes_it(kit):
    scheduler = kit.scheduler()
    kit.add(scheduler, "ab", PROMPT)
    scheduler.add(kit.request("c", (*PROMPT, 1)))
    plan = scheduler.plan()
    assert [a.num_cached for a in plan.admissions] == [0, 0, 0]
    scheduler.add(kit.request("d", PROMPT[:9] + (0,) * 4))
    later = scheduler.plan()
    [admission] = later.admissions
    assert admission.num_cached == 8
    assert planned_blocks(later, 3)[:2] == planned_blocks(plan, 0)[:2]
    scheduler.check_integrity()


def test_the_last_prompt_token_is_always_computed(kit):
    scheduler = kit.scheduler(num_speculative_tokens=4)
    scheduler.add(kit.request("a", PROMPT))
    kit.step(scheduler)
    scheduler.add(kit.request("b", PROMPT))
    scheduler.add(kit.request("c", PROMPT[:12]))
    plan, updates = kit.step(scheduler)
    assert [a.num_cached for a in plan.admissions] == [12, 8]
    assert kit.rows(plan)[1:] == [(1, 1, 0, True), (2, 4, 0, True)]
    assert [u.num_cached for u in updates] == [0, 12, 8]
    assert (scheduler.prefix_cache_hits, scheduler.prefix_cache_queries) == (20, 13 + 13 + 12)


def test_lookahead_keeps_a_block_from_prompts_that_go_on_otherwise(kit):
    one, other = (*PROMPT[:8], 1, 2), (*PROMPT[:8], 3, 2)
    for lookahead, num_cached in ((0, 8), (1, 4)):
        scheduler = kit.scheduler(lookahead_tokens=lookahead)
        scheduler.add(kit.request("a", one))
        kit.step(scheduler)
        kit.step(scheduler)
        scheduler.add(kit.request("b", other))
        assert scheduler.plan().admissions[0].num_cached == num_cached


def test_a_cached_prefix_costs_no_rows(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=10)
    scheduler.add(kit.request("a", PROMPT[:5]))
    kit.step(scheduler)
    scheduler.add(kit.request("b", PROMPT))
    # Nine tokens are left of the prompt, and nine rows beside the one that decodes.
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 0, True), (1, 9, 0, True)]


def with_a_prefix_to_take(kit, **limits):
    """Six blocks are cached and none is free.

    "old" takes the end of the chain that "next" finds, in the plan that admits "next".
    """
    scheduler = kit.scheduler(num_blocks=12, **limits)
    for name, prompt in (("first", PROMPT), ("second", 13)):
        scheduler.add(kit.request(name, prompt, max_total=14))
        while not kit.step(scheduler)[0].requests[0].samples:
            pass
        scheduler.release(name)
    scheduler.add(kit.request("old", 23, max_total=36))
    kit.step(scheduler)
    scheduler.add(kit.request("next", PROMPT))
    return scheduler


def test_a_prefix_whose_blocks_were_taken_meanwhile_is_computed(kit):
    scheduler = with_a_prefix_to_take(kit)
    plan, _ = kit.step(scheduler)
    assert [admission.num_cached for admission in plan.admissions] == [8]
    [row] = [row for row in plan.requests if row.slot == plan.admissions[0].slot]
    assert (row.num_query, row.samples) == (1, False)
    plan, _ = kit.step(scheduler)
    assert kit.rows(plan)[1:] == [(row.slot, 4, 0, True)]


def test_a_fast_prompt_whose_prefix_was_taken_waits_for_a_step_with_a_whole_chunk(kit):
    """It would begin inside of one with the rows that the rest of it needed."""
    scheduler = with_a_prefix_to_take(kit, fast_form=FastForm(9, 4))
    assert not kit.step(scheduler)[0].admissions
    plan, _ = kit.step(scheduler)
    assert [admission.num_cached for admission in plan.admissions] == [8]
    assert plan.requests[-1].num_query == 4


def test_prompt_logprobs_read_no_cache_but_fill_it(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("a", PROMPT, prompt_logprobs=0))
    kit.step(scheduler)
    scheduler.add(kit.request("b", PROMPT, prompt_logprobs=0))
    scheduler.add(kit.request("c", PROMPT))
    assert [a.num_cached for a in scheduler.plan().admissions] == [0, 12]
    assert (scheduler.prefix_cache_hits, scheduler.prefix_cache_queries) == (12, 13)


def test_without_prefix_caching_nothing_is_shared(kit):
    scheduler = kit.scheduler(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(kit.request(name, PROMPT))
        assert kit.step(scheduler)[0].admissions[0].num_cached == 0
    scheduler.release("a", len(PROMPT))
    assert scheduler.prefix_cache_queries == len(scheduler._pool.prefix_cache.blocks()) == 0


def test_a_request_may_keep_out_of_the_prefix_cache(kit):
    scheduler = kit.scheduler()
    prompt = tuple(range(9))
    scheduler.add(kit.request("alone", prompt, cached=False))
    kit.step(scheduler)
    kit.step(scheduler)
    scheduler.release("alone", 10)
    scheduler.add(kit.request("other", prompt))
    plan, _ = kit.step(scheduler)
    assert plan.admissions[0].num_cached == 0, "it left nothing"
    scheduler.add(kit.request("late", prompt))
    scheduler.add(kit.request("again", prompt, cached=False))
    assert scheduler.num_waiting_tokens == 18
    plan, _ = kit.step(scheduler)
    assert [admission.num_cached for admission in plan.admissions] == [8, 0]
    assert scheduler.prefix_cache_queries == 18
    assert scheduler.num_waiting_tokens == 0


def test_a_released_prefix_is_kept_until_its_blocks_are_needed(kit):
    scheduler = kit.scheduler(num_blocks=8)
    scheduler.add(kit.request("a", PROMPT, max_total=14))
    kit.step(scheduler)
    scheduler.release("a")
    assert scheduler.kv_usage == 0
    scheduler.add(kit.request("b", PROMPT, max_total=14))
    assert kit.step(scheduler)[0].admissions[0].num_cached == 12
    scheduler.release("b")
    scheduler.add(kit.request("all", 27, max_total=28))
    while not kit.step(scheduler)[1]:
        pass
    scheduler.release("all")
    scheduler.add(kit.request("c", PROMPT, max_total=14))
    # Its far end went first; "all" took 7 of 8 blocks and left the chain's first.
    assert kit.step(scheduler)[0].admissions[0].num_cached == 4


def crowded(kit, **overrides):
    """Two requests that fill six blocks: a and b hold 3 each and both want to grow."""
    limits = {"num_blocks": 6, **overrides}
    scheduler = kit.scheduler(**limits)
    kit.add(scheduler, "ab", 11, max_total=24)
    kit.step(scheduler)
    return scheduler


def test_the_youngest_is_swapped_out_keeps_its_slot_and_returns(kit):
    scheduler = crowded(kit)
    plan, updates = kit.step(scheduler)
    [swap] = plan.swap_outs
    assert (swap.slot, len(swap.block_ids)) == (1, 3)
    assert kit.rows(plan) == [(0, 1, 0, True)]
    assert (scheduler.num_running, scheduler.num_swapped) == (1, 1)
    assert scheduler.num_preemptions == 1
    # a's new block may be one that b has just left: swap-outs come first.
    assert set(planned_blocks(plan, 0)) <= set(swap.block_ids)
    for _ in range(4):
        assert not kit.step(scheduler)[0].swap_ins
    scheduler.release("a")
    plan, updates = kit.step(scheduler)
    [back] = plan.swap_ins
    assert (back.slot, back.host_blocks, len(back.block_ids)) == (1, swap.host_blocks, 3)
    [assignment] = plan.block_assignments
    assert assignment.first_index == 0
    assert assignment.block_ids[:3] == back.block_ids
    assert len(assignment.block_ids) == 4
    assert kit.rows(plan) == [(1, 1, 0, True)]
    assert [u.request_id for u in updates] == ["b"]


def test_nobody_is_preempted_for_a_younger_request(kit):
    scheduler = kit.scheduler(num_blocks=6, max_num_batched_tokens=16)
    scheduler.add(kit.request("old", 12, max_total=16))
    kit.step(scheduler)
    scheduler.add(kit.request("young", 7, max_total=20))
    for _ in range(3):
        plan, _ = kit.step(scheduler)
        assert not plan.swap_outs
        assert 0 in [row.slot for row in plan.requests]
    assert scheduler.num_running == 2
    # young is out of blocks and old at its limit: only old's release helps.
    assert scheduler.plan() is None
    scheduler.release("old")
    assert kit.rows(scheduler.plan()) == [(1, 1, 0, True)]


def test_drafts_shrink_before_anybody_is_preempted(kit):
    scheduler = kit.scheduler(num_blocks=6, num_speculative_tokens=8)
    kit.add(scheduler, "ab", 9, max_total=24)
    kit.step(scheduler)
    plan, _ = kit.step(scheduler)
    assert not plan.swap_outs
    # hi is 10; three blocks hold 12.
    assert kit.rows(plan) == [(0, 1, 1, True), (1, 1, 1, True)]


def test_swapped_requests_return_before_anybody_is_admitted(kit):
    scheduler = crowded(kit)
    kit.step(scheduler)
    scheduler.add(kit.request("c", 2, max_total=4))
    plan, _ = kit.step(scheduler)
    assert (scheduler.num_swapped, scheduler.num_waiting) == (1, 1)
    scheduler.release("a")
    plan, _ = kit.step(scheduler)
    assert [swap.slot for swap in plan.swap_ins] == [1]
    assert plan.admissions == ()
    assert [a.slot for a in kit.step(scheduler)[0].admissions] == [0]


def test_swapped_requests_return_oldest_first(kit):
    scheduler = kit.scheduler(num_blocks=9)
    kit.add(scheduler, "abc", 11, max_total=36)
    kit.step(scheduler)
    order = []
    while scheduler.has_unfinished:
        plan, updates = kit.step(scheduler)
        order += [("out", swap.slot) for swap in plan.swap_outs]
        order += [("in", swap.slot) for swap in plan.swap_ins]
        for update in updates:
            state = scheduler._running.get(update.request_id)
            if state is not None and state.at_limit:
                scheduler.release(update.request_id)
    # a grows over c, then over b; they come back in order of age; then b grows over c.
    swaps = [("out", 2), ("out", 1), ("in", 1), ("in", 2), ("out", 2), ("in", 2)]
    assert order == swaps


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_no_swapped_request_passes_an_older_one_however_few_rows_there_are(kit, rows):
    scheduler = kit.scheduler(num_blocks=16, max_num_seqs=5, max_num_batched_tokens=rows)
    scheduler.add(kit.request("a", 30, max_total=64))
    while scheduler.num_waiting or scheduler._running["a"].prefilling:
        kit.step(scheduler)
    kit.add(scheduler, "bcde", 2, max_total=64)
    while scheduler.num_swapped < 4:
        kit.step(scheduler)
    scheduler.release("a")
    returned = []
    while scheduler.num_swapped:
        returned += [swap.slot for swap in kit.step(scheduler)[0].swap_ins]
    assert returned == [1, 2, 3, 4]


def test_steps_in_flight_of_a_swapped_request_settle_as_usual(kit):
    scheduler = kit.scheduler(num_blocks=6)
    kit.add(scheduler, "ab", 11, max_total=24)
    first, second = scheduler.plan(), scheduler.plan()
    assert [swap.slot for swap in second.swap_outs] == [1]
    updates = scheduler.process_output(kit.result(first))
    assert [update.request_id for update in updates] == ["a", "b"]
    assert [u.request_id for u in scheduler.process_output(kit.result(second))] == ["a"]
    scheduler.check_integrity()


def test_a_swapped_request_whose_steps_in_flight_may_end_it_does_not_return(kit):
    """A window more would compute positions beyond its last."""
    scheduler = kit.scheduler(num_blocks=4)
    scheduler.add(kit.request("old", 11, max_total=16))
    scheduler.add(kit.request("young", 2, max_total=3))
    plans = [scheduler.plan(), scheduler.plan()]
    assert [swap.slot for swap in plans[1].swap_outs] == [1]
    scheduler.release("old")
    for plan in plans:
        scheduler.process_output(kit.result(plan))
    assert scheduler.plan() is None
    assert scheduler.num_swapped == 1


def test_a_shared_prefix_is_copied_out_and_comes_back_unshared(kit):
    scheduler = kit.scheduler(num_blocks=6)
    scheduler.add(kit.request("a", PROMPT[:11], max_total=24))
    kit.step(scheduler)
    scheduler.add(kit.request("b", PROMPT[:11], max_total=16))
    plan, _ = kit.step(scheduler)
    shared = planned_blocks(plan, 1)[:2]
    while not plan.swap_outs:
        plan, _ = kit.step(scheduler)
    [swap] = plan.swap_outs
    assert list(swap.block_ids[:2]) == shared
    scheduler.release("a")
    plan, _ = kit.step(scheduler)
    [back] = plan.swap_ins
    assert len(back.block_ids) == len(swap.block_ids)
    scheduler.check_integrity()


def test_a_waiting_request_just_goes(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("r", 3))
    scheduler.release("r")
    scheduler.release("r")
    scheduler.release("never seen")
    assert not scheduler.has_unfinished
    assert scheduler.plan() is None


def test_a_released_request_lingers_until_its_steps_are_settled(kit):
    scheduler = kit.scheduler(max_num_seqs=1)
    kit.add(scheduler, "ab", 3)
    first, second = scheduler.plan(), scheduler.plan()
    scheduler.release("a")
    assert scheduler.num_running == 0
    assert scheduler.has_unfinished
    assert scheduler.kv_usage > 0
    assert scheduler.plan() is None
    assert scheduler.process_output(kit.result(first)) == ()
    assert scheduler.plan() is None
    assert scheduler.process_output(kit.result(second)) == ()
    plan = scheduler.plan()
    assert [a.slot for a in plan.admissions] == [0]


def test_an_aborted_swapped_request_leaves_its_host_blocks(kit):
    scheduler = crowded(kit)
    kit.step(scheduler)
    assert scheduler.swap_usage == 3 / 32
    scheduler.release("b")
    assert scheduler.swap_usage == 0
    scheduler.release("a")
    assert not scheduler.has_unfinished
    assert scheduler.plan() is None


def test_a_swapped_request_with_steps_in_flight_leaves_its_host_blocks_after_them(kit):
    scheduler = kit.scheduler(num_blocks=6)
    kit.add(scheduler, "ab", 11, max_total=24)
    first, _ = scheduler.plan(), scheduler.plan()
    scheduler.release("b")
    scheduler.plan()
    assert scheduler.swap_usage == 3 / 32
    scheduler.process_output(kit.result(first))
    assert scheduler.swap_usage == 0
    scheduler.check_integrity()


def test_a_poisoned_request_is_released_alone(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("a", 5))
    scheduler.add(kit.request("b", PROMPT))
    plan = scheduler.plan()
    good, bad = scheduler.process_output(kit.result(plan, failed=(1,)))
    assert (good.request_id, good.failed, good.token_ids) == ("a", False, (7,))
    assert (bad.request_id, bad.failed, bad.token_ids) == ("b", True, ())
    assert scheduler.num_running == 1
    scheduler.check_integrity()
    # Nobody starts from what it computed.
    scheduler.add(kit.request("b", PROMPT))
    assert scheduler.plan().admissions[0].num_cached == 0


@pytest.mark.parametrize("lengths", [(7, 7), (7, 11), (11, 7)])
@pytest.mark.parametrize(
    "victim",
    [
        "blocks",
        "no block",
        "one block twice",
        "written block",
        "state",
        "slot",
        "status",
        "in flight",
    ],
)
def test_integrity_check_sees_damage(kit, victim, lengths):
    scheduler = kit.scheduler(lookahead_slots=1, num_kept_states=1)
    # The token to come fills the last block, and the lookahead begins one more.
    for name, length in zip("ab", lengths, strict=True):
        scheduler.add(kit.request(name, length))
    scheduler.plan()
    scheduler.check_integrity()
    a, b = scheduler._running.values()
    if victim == "blocks":
        b.blocks[0] = a.blocks[0]
    elif victim == "no block":
        scheduler._pool.release([b.blocks.pop()])
    elif victim == "one block twice":
        scheduler._pool.release([b.blocks.pop()])
        b.blocks.append(b.blocks[0])
        scheduler._pool.share(b.blocks[:1])
    elif victim == "written block":
        # One of them writes its seventh position here, another has computed all of them.
        scheduler._pool.release([b.blocks[1]])
        b.blocks[1] = a.blocks[1]
        scheduler._pool.share([a.blocks[1]])
    elif victim == "state":
        a.held_states[8] = 0
    elif victim == "slot":
        b.slot = a.slot
    elif victim == "status":
        a.status = Status.SWAPPED
    else:
        a.num_in_flight = 0
    with pytest.raises(InvariantError):
        scheduler.check_integrity()


def overdrawn(kit):
    """``young`` holds three blocks for drafts that fill two at most once they are verified."""
    scheduler = kit.scheduler(num_blocks=6, num_speculative_tokens=8)
    scheduler.add(kit.request("old", 10, max_total=24, max_drafts=0))
    scheduler.add(kit.request("young", 3, max_total=24))
    kit.step(scheduler)
    window = scheduler.plan()
    assert kit.rows(window) == [(0, 1, 0, True), (1, 1, 7, True)]
    return scheduler, window


def test_a_plan_that_swaps_out_brings_nobody_in(kit):
    scheduler, window = overdrawn(kit)
    scheduler.process_output(kit.result(window, accept=0))
    plan, _ = kit.step(scheduler)
    assert [len(swap.block_ids) for swap in plan.swap_outs] == [2]
    # There would be room for it at once.
    assert (plan.swap_ins, kit.rows(plan)) == ((), [(0, 1, 0, True)])
    assert [len(swap.block_ids) for swap in kit.step(scheduler)[0].swap_ins] == [2]


def test_what_was_saved_has_room_even_if_its_drafts_were_rejected(kit):
    scheduler, window = overdrawn(kit)
    plan = scheduler.plan()
    # Its window is in flight: twelve tokens may come to be.
    assert [len(swap.block_ids) for swap in plan.swap_outs] == [3]
    scheduler.process_output(kit.result(window, accept=0))
    scheduler.process_output(kit.result(plan))
    # Two blocks would do for its next row, but three were saved.
    assert kit.step(scheduler)[0].swap_ins == ()
    scheduler.release("old")
    assert [len(swap.block_ids) for swap in kit.step(scheduler)[0].swap_ins] == [3]


def test_who_replays_returns_to_blocks_for_all_of_it(kit):
    """It would be preempted again before it has computed what it had."""
    sizes = {"num_blocks": 7, "num_host_blocks": 0, "longest_chunk": 5, "lookahead_slots": 1}
    scheduler = kit.scheduler(**sizes)
    scheduler.add(kit.request("old", 3, max_total=20))
    scheduler.add(kit.request("young", 15, max_total=18))
    while not scheduler.num_swapped:
        kit.step(scheduler)
    # Sixteen positions, the token after them and the lookahead need five.
    assert scheduler._pool.num_available == 4
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 0, True)]
    scheduler.release("old")
    plan, _ = kit.step(scheduler)
    assert [len(one.block_ids) for one in plan.block_assignments] == [5]
    assert (plan.restarts, plan.requests[0].replays) == ((1,), True)
    assert scheduler._running["young"].num_replayed == 16
    # Its third chunk ends where the prompt ends, whose next token is known.
    while scheduler._running["young"].replays:
        plan, updates = kit.step(scheduler)
        assert (kit.rows(plan)[0][2:], updates) == ((0, False), ())
    assert kit.rows(kit.step(scheduler)[0]) == [(1, 1, 0, True)]


def test_a_chunk_takes_the_blocks_that_are_left_and_preempts_for_its_next_token_alone(kit):
    prefix = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    scheduler = kit.scheduler(num_blocks=13, longest_chunk=16)
    scheduler.add(kit.request("long", 48, max_total=50))
    scheduler.add(kit.request("b", prefix, max_total=12))
    kit.step(scheduler)
    scheduler.add(kit.request("c", prefix, max_total=12))
    assert kit.step(scheduler)[0].admissions[0].num_cached == 8
    # No block is free; its nine hold 36 positions, and one token more after the chunk.
    plan, _ = kit.step(scheduler)
    assert plan.swap_outs == ()
    assert (0, 3, 0, False) in kit.rows(plan)
    # The youngest shares two blocks with another one, and leaves one.
    plan, _ = kit.step(scheduler)
    assert [swap.slot for swap in plan.swap_outs] == [2]
    assert kit.rows(plan) == [(0, 4, 0, False)]
    plan, _ = kit.step(scheduler)
    assert [swap.slot for swap in plan.swap_outs] == [1]
    assert kit.rows(plan) == [(0, 9, 0, True)]


def test_a_prompt_waits_for_the_blocks_of_a_whole_chunk(kit):
    """Its next token alone would have a place, in the last block of those that it has."""
    scheduler = kit.scheduler(num_blocks=13, longest_chunk=8, fast_form=FastForm(9, 8))
    scheduler.add(kit.request("old", 33, max_total=35))
    scheduler.add(kit.request("young", 25, max_total=27))
    plans = [kit.step(scheduler)[0] for _ in range(4)]
    rows = [[(one.slot, one.num_query) for one in plan.requests] for plan in plans]
    assert rows == [[(0, 8), (1, 8)], [(0, 8), (1, 8)], [(0, 8)], [(0, 8)]]
    assert [swap.slot for swap in plans[3].swap_outs] == [1]
    while "old" in scheduler._running:
        if kit.step(scheduler)[1][0].samples:
            scheduler.release("old")
    taken = scheduler._pool.allocate(7)
    assert scheduler.plan() is None
    scheduler._pool.release(taken[:1])
    plan = scheduler.plan()
    assert [(one.slot, one.num_query) for one in plan.requests] == [(1, 8)]


def test_nobody_comes_in_while_a_running_request_lacks_blocks(kit):
    scheduler = kit.scheduler(
        max_num_seqs=7, num_blocks=16, max_num_batched_tokens=16, num_speculative_tokens=2
    )
    kit.add(scheduler, "abcde", 3, max_total=11)
    scheduler.add(kit.request("long", 40, max_total=48))
    scheduler.add(kit.request("small", 2, max_total=4))
    kit.step(scheduler)
    while (plan := kit.step(scheduler, accept=2)[0]).swap_outs == ():
        assert 6 not in [row.slot for row in plan.requests]
    # "long" has given way to older ones, and "small" waits although a block is free.
    assert scheduler.num_waiting == 1
    assert plan.admissions == ()


def test_a_step_may_swap_out_and_do_nothing_else(kit):
    """What the youngest leaves is too little while steps in flight use what others have left."""
    scheduler = kit.scheduler(
        num_blocks=9, max_num_seqs=7, longest_chunk=8, fast_form=FastForm(20, 8)
    )
    scheduler.add(kit.request("old", 33, max_total=35))
    scheduler.add(kit.request("young", 2, max_total=8))
    kit.add(scheduler, "abcde", 3)
    plans = [scheduler.plan()]
    for name in "abcde":
        scheduler.release(name)
    plans.append(scheduler.plan())
    assert [swap.slot for swap in plans[1].swap_outs] == [1]
    assert plans[1].requests == ()
    # There would be room for it at once, but the older one goes first.
    assert scheduler.plan() is None
    for plan in plans:
        scheduler.process_output(kit.result(plan))
    plan, _ = kit.step(scheduler)
    assert [swap.host_blocks for swap in plan.swap_ins] == [plans[1].swap_outs[0].host_blocks]
    assert (0, 8, 0, False) in kit.rows(plan)


def test_drafts_do_not_crowd_out_a_request_that_could_return(kit):
    scheduler = kit.scheduler(num_blocks=8, max_num_batched_tokens=9, num_speculative_tokens=8)
    scheduler.add(kit.request("a", 3, max_total=28))
    kit.add(scheduler, "bc", 3, max_total=20, max_drafts=0)
    while not scheduler.num_swapped:
        kit.step(scheduler)
    scheduler.release("b")
    plan, _ = kit.step(scheduler)
    assert [swap.slot for swap in plan.swap_ins] == [2]
    assert kit.rows(plan) == [(0, 1, 7, True), (2, 1, 0, True)]


def test_the_oldest_always_advances(kit):
    """However short memory is, and whoever came after."""
    scheduler = kit.scheduler(num_blocks=6, longest_chunk=4, num_speculative_tokens=3)
    kit.add(scheduler, "abcd", 6, max_total=24)
    for accept in range(60):
        if not scheduler.has_unfinished:
            break
        states = [*scheduler._running.values(), *scheduler._swapped.values()]
        oldest = states[0] if scheduler._running else None
        plan, _ = kit.step(scheduler, accept % 4)
        if oldest is not None:
            assert oldest.slot in [row.slot for row in plan.requests]
        for state in states:
            if state.at_limit:
                scheduler.release(state.request.request_id)
    assert not scheduler.has_unfinished


def test_a_waiting_prompt_is_looked_up_once_a_plan_and_again_as_it_comes_in(kit, monkeypatch):
    scheduler = kit.scheduler(max_num_batched_tokens=8)
    cache, looked_up = scheduler._pool.prefix_cache, []
    match = cache.match
    monkeypatch.setattr(cache, "match", lambda keys: looked_up.append(keys) or match(keys))
    kit.add(scheduler, "abc", 6)
    plan, _ = kit.step(scheduler)
    assert len(plan.admissions) == 2
    assert len(looked_up) == 3 + 2


def test_evicted_prefixes_are_saved_by_one_copy(kit):
    scheduler = kit.scheduler(num_blocks=6, num_idle_host_blocks=32)
    scheduler.add(kit.request("a", 16))
    kit.step(scheduler)
    scheduler.release("a")
    scheduler.add(kit.request("b", 20, max_total=22))
    plan, _ = kit.step(scheduler)
    assert [len(swap.block_ids) for swap in plan.swap_outs] == [4]
    scheduler.release("b")
    scheduler.add(kit.request("a", 16))
    plan, _ = kit.step(scheduler)
    assert [len(swap.block_ids) for swap in plan.swap_ins] == [3]
    assert scheduler.swapped_prefix_hits == scheduler.prefix_cache_hits == 12


def test_a_prefix_that_is_lost_in_swap_space_is_computed(kit, monkeypatch):
    scheduler = kit.scheduler(num_blocks=6, num_idle_host_blocks=32)
    scheduler.add(kit.request("a", PROMPT))
    kit.step(scheduler)
    scheduler.release("a")
    # Of the three blocks of the chain the last one goes.
    scheduler.add(kit.request("b", 13, max_total=14))
    assert [len(swap.block_ids) for swap in kit.step(scheduler)[0].swap_outs] == [1]
    scheduler.release("b")
    monkeypatch.setattr(scheduler._swap, "fetch", lambda keys: Found.GONE if keys else Found.HERE)
    scheduler.add(kit.request("next", PROMPT))
    plan, _ = kit.step(scheduler)
    assert (plan.admissions[0].num_cached, plan.swap_ins) == (8, ())
    assert kit.rows(plan) == [(0, 5, 0, True)]


def cached_after_a_failure(kit, scheduler):
    """Run the one request to the end of its prompt, where it fails; then ask the same again."""
    plan = scheduler.plan()
    while not plan.requests[0].samples:
        scheduler.process_output(kit.result(plan))
        plan = scheduler.plan()
    [update] = scheduler.process_output(kit.result(plan, failed=(plan.requests[0].slot,)))
    assert update.failed
    scheduler.check_integrity()
    scheduler.add(kit.request("next", PROMPT * 2))
    return scheduler.plan().admissions[0].num_cached


def test_a_poisoned_request_takes_saved_blocks_back(kit):
    """They were saved before it read them: what it read may be what was wrong."""
    scheduler = kit.scheduler(num_blocks=9, num_idle_host_blocks=32)
    for name, prompt in (("before", PROMPT * 2), ("other", range(35))):
        scheduler.add(kit.request(name, prompt, max_total=len(prompt) + 1))
        kit.step(scheduler)
        scheduler.release(name)
    scheduler.add(kit.request("bad", PROMPT * 2, max_total=28))
    assert cached_after_a_failure(kit, scheduler) == 0
    assert scheduler.swapped_prefix_hits > 0


def test_a_poisoned_request_takes_blocks_behind_its_window_back(kit):
    scheduler = kit.scheduler(sliding_window=4, longest_chunk=8)
    scheduler.add(kit.request("bad", PROMPT * 2))
    assert cached_after_a_failure(kit, scheduler) == 0


def test_a_poisoned_request_takes_blocks_back_that_it_left_when_it_was_preempted(kit):
    scheduler = kit.scheduler(num_blocks=10, longest_chunk=2)
    scheduler.add(kit.request("old", 3, max_total=30))
    scheduler.add(kit.request("bad", PROMPT * 2, max_total=28))
    while not scheduler.num_swapped:
        kit.step(scheduler)
    scheduler.release("old")
    assert cached_after_a_failure(kit, scheduler) == 0


def test_who_sees_no_block_is_swapped_out_without_a_copy(kit):
    """Such a request restarts; an empty copy in a plan would be nobody's."""
    scheduler = kit.scheduler(sliding_window=1, longest_chunk=4)
    scheduler.add(kit.request("r", 12))
    kit.step(scheduler)
    [victim], memory, draft = scheduler._running.values(), scheduler._memory, PlanDraft(1)
    memory.drop_behind(victim)
    memory.swap_out(victim, draft)
    assert draft.swap_outs == []
    assert memory.may_return(victim)
    assert victim.replays


def test_the_last_chunk_of_the_fast_form_needs_no_block_beyond_the_prompt(kit):
    """Of three rows, in the last block there is."""
    sizes = {"num_blocks": 6, "max_num_batched_tokens": 16, "longest_chunk": 16}
    scheduler = kit.scheduler(**sizes, fast_form=FastForm(9, 16))
    scheduler.add(kit.request("one", 19, max_total=20))
    rows = [kit.rows(kit.step(scheduler)[0]) for _ in range(2)]
    assert rows == [[(0, 16, 0, False)], [(0, 3, 0, True)]]

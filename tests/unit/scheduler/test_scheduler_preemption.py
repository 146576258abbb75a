"""Corners of preemption: who comes back when, and with how many blocks."""


def overdrawn(kit):
    """``young`` holds three blocks for drafts that fill two at most once they are judged."""
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


def test_nobody_comes_in_while_a_running_request_lacks_blocks(kit):
    scheduler = kit.scheduler(
        max_num_seqs=7, num_blocks=16, max_num_batched_tokens=16, num_speculative_tokens=2
    )
    for name in "abcde":
        scheduler.add(kit.request(name, 3, max_total=11))
    scheduler.add(kit.request("long", 40, max_total=48))
    scheduler.add(kit.request("small", 2, max_total=4))
    kit.step(scheduler)
    while (plan := kit.step(scheduler, accept=2)[0]).swap_outs == ():
        assert 6 not in [row.slot for row in plan.requests]
    # "long" has given way to older ones, and "small" waits although a block is free.
    assert scheduler.num_waiting == 1
    assert plan.admissions == ()


def test_drafts_do_not_crowd_out_a_request_that_could_return(kit):
    scheduler = kit.scheduler(num_blocks=8, max_num_batched_tokens=9, num_speculative_tokens=8)
    scheduler.add(kit.request("a", 3, max_total=28))
    scheduler.add(kit.request("b", 3, max_total=20, max_drafts=0))
    scheduler.add(kit.request("c", 3, max_total=20, max_drafts=0))
    while not scheduler.num_swapped:
        kit.step(scheduler)
    scheduler.release("b")
    plan, _ = kit.step(scheduler)
    assert [swap.slot for swap in plan.swap_ins] == [2]
    assert kit.rows(plan) == [(0, 1, 7, True), (2, 1, 0, True)]


def test_the_oldest_always_advances(kit):
    """However short memory is, and whoever came after."""
    scheduler = kit.scheduler(num_blocks=6, longest_chunk=4, num_speculative_tokens=3)
    for name in "abcd":
        scheduler.add(kit.request(name, 6, max_total=24))
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

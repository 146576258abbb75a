"""Which recurrent states are kept, in how many places, and which requests start from them."""

from __future__ import annotations

import pytest

from sametoken.errors import InvariantError
from sametoken.scheduler import kept_states
from sametoken.scheduler.kept_states import StatePool
from sametoken.types.fast_prompts import FastForm


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    """Eight tokens, in blocks of four."""
    monkeypatch.setattr(kept_states, "INTERVAL", 2)


def spoken(prompt: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt and what the bench's device makes of it: it says 7 and nothing else."""
    return (*range(100, 100 + prompt), *(7,) * (num_tokens - prompt))


def ask(kit, scheduler, name: str, prompt, **options):
    """Run a request's prompt; returns its admission and the plans until it samples."""
    scheduler.add(kit.request(name, prompt, **options))
    plans = []
    while not plans or not any(row.samples for row in plans[-1].requests):
        plan, _ = kit.step(scheduler)
        plans.append(plan)
    return plans[0].admissions[-1], plans


def finish(kit, scheduler, name: str, num_kept: int) -> None:
    while scheduler._running[name].num_processed < num_kept:
        kit.step(scheduler)
    scheduler.release(name, num_kept)
    scheduler.check_integrity()


def test_the_least_recently_used_state_is_evicted():
    pool = StatePool(2)
    first, second = pool.keep(b"1"), pool.keep(b"2")
    assert pool.keep(b"1") is None, "it is kept already, and used again"
    assert pool.keep(b"3") == second
    assert [pool.longest([key]) for key in (b"1", b"2", b"3")] == [1, 0, 1]
    assert pool.use(b"1") == first
    assert pool.longest([b"1", b"2", b"3", b"4"]) == 3
    pool.check_integrity([])


def test_requests_that_run_hold_half_of_the_states_at_most():
    pool = StatePool(4)
    held = [pool.hold() for _ in range(3)]
    assert held[2] is None
    pool.check_integrity(held[:2])
    with pytest.raises(InvariantError, match="hold the states"):
        pool.check_integrity([])
    kept = [pool.keep(key) for key in (b"1", b"2", b"3")]
    assert kept[2] == kept[0], "held states are not evicted"
    pool.give(b"4", held[0])
    pool.give(b"2", held[1])
    pool.check_integrity([])
    # A key that has a state already is used again.
    assert None not in (pool.keep(b"5"), pool.keep(b"6"))
    assert [pool.longest([key]) for key in (b"2", b"3", b"4")] == [1, 0, 1]
    pool.check_integrity([])


def test_half_of_six_states_are_three():
    pool = StatePool(6)
    assert [pool.hold() is None for _ in range(4)] == [False, False, False, True]


def test_a_single_state_serves_an_answer_too():
    pool = StatePool(1)
    assert pool.hold() == 0
    assert pool.keep(b"1") is None, "none is left, and none is evicted"


def test_a_chunk_ends_where_a_prompt_s_state_is_kept(kit):
    scheduler = kit.scheduler(num_kept_states=4)
    _, (first, last) = ask(kit, scheduler, "first", spoken(18, 18))
    assert [row.num_query for row in (*first.requests, *last.requests)] == [16, 2]
    (copy,) = first.kept_states
    assert (copy.slot, copy.position) == (first.requests[0].slot, 16)
    assert last.kept_states == ()
    admission, (plan,) = ask(kit, scheduler, "second", spoken(18, 18))
    assert admission.num_cached == 16
    assert plan.restored_states[0].state == copy.state


def test_a_prompt_may_be_cut_twice(kit):
    """Where it parts from an earlier one, and at its last block."""
    scheduler = kit.scheduler(num_kept_states=4)
    ask(kit, scheduler, "first", spoken(17, 17))
    scheduler.release("first")
    _, plans = ask(kit, scheduler, "second", (*spoken(10, 10), *range(20)))
    assert [row.num_query for plan in plans for row in plan.requests] == [8, 20, 2]


def test_a_short_prompt_is_not_cut(kit):
    """A step more is not worth it, unless another has begun alike: then it is where they part."""
    scheduler = kit.scheduler(num_kept_states=4)
    _, (plan,) = ask(kit, scheduler, "first", spoken(6, 6))
    assert plan.kept_states == ()
    scheduler.release("first")
    admission, plans = ask(kit, scheduler, "second", (*spoken(5, 5), 1, 2))
    assert admission.num_cached == 0
    assert [len(plan.kept_states) for plan in plans] == [1, 0]
    assert ask(kit, scheduler, "third", spoken(5, 9))[0].num_cached == 4


@pytest.mark.parametrize(
    ("prompt_len", "start", "num_cached", "ends"),
    [
        (7, 0, 0, ()),
        (8, 0, 0, (8,)),  # a chunk ends there anyhow
        (9, 0, 0, (8,)),
        (9, 0, 1, (4,)),
        (18, 0, 1, (4, 16)),
        (18, 8, 3, (16,)),  # 12 is too near to 8
        (18, 4, 3, (12,)),
        (18, 16, 4, ()),
        (20, 16, 4, (20,)),
    ],
)
def test_states_of_a_prompt_are_some_blocks_apart(kit, prompt_len, start, num_cached, ends):
    scheduler = kit.scheduler(num_kept_states=4)
    scheduler.add(kit.request("one", prompt_len))
    states = scheduler._states
    assert states.chunk_ends(scheduler._waiting["one"], start, num_cached) == ends


@pytest.mark.parametrize(
    ("prompt_len", "num_cached", "lookahead", "ends"),
    [
        (22, 0, 1, (16,)),
        (22, 3, 0, (8, 16)),
        (22, 1, 0, (16,)),
        (17, 0, 1, (16,)),
        (17, 0, 2, (8,)),  # the block that ends at 16 has no key
        (9, 0, 0, (8,)),
        (8, 0, 0, (8,)),  # too short
        (6, 0, 0, ()),
    ],
)
def test_states_of_a_fast_prompt_lie_at_multiples_of_its_chunks(
    kit, prompt_len, num_cached, lookahead, ends
):
    fast = {"fast_form": FastForm(9, 8), "lookahead_tokens": lookahead}
    scheduler = kit.scheduler(num_kept_states=4, **fast)
    scheduler.add(kit.request("one", prompt_len))
    states = scheduler._states
    assert states.chunk_ends(scheduler._waiting["one"], 0, num_cached) == ends


def test_a_state_at_the_end_of_the_fast_form_costs_no_step(kit):
    """A chunk ends there anyhow, however few blocks are new."""
    scheduler = kit.scheduler(num_kept_states=4, fast_form=FastForm(5, 4))
    _, plans = ask(kit, scheduler, "one", spoken(9, 9))
    assert [copy.position for plan in plans for copy in plan.kept_states] == [8]


def test_a_fast_prompt_shares_states_of_its_fast_form_alone(kit):
    scheduler = kit.scheduler(num_kept_states=4, fast_form=FastForm(9, 8))
    ask(kit, scheduler, "usual", spoken(8, 8))
    admission, plans = ask(kit, scheduler, "fast", spoken(18, 18))
    assert admission.num_cached == 0
    assert [copy.position for plan in plans for copy in plan.kept_states] == [16]
    while scheduler._running["fast"].num_processed < 26:
        assert not kit.step(scheduler)[0].kept_states
    finish(kit, scheduler, "fast", 26)
    assert ask(kit, scheduler, "next", spoken(18, 27))[0].num_cached == 16


def test_blocks_without_a_state_serve_nobody(kit):
    """Of two blocks that are cached, the state at the end of the first is kept."""
    scheduler = kit.scheduler(num_kept_states=4)
    ask(kit, scheduler, "first", spoken(9, 9))
    kept = scheduler._states.pool
    assert len(kept._state_of) == 1
    kept.forget(next(iter(kept._state_of)))
    assert ask(kit, scheduler, "second", spoken(9, 9))[0].num_cached == 0
    # It computes them again, in blocks of its own.
    first, second = scheduler._running.values()
    assert not {*first.blocks} & {*second.blocks}
    assert ask(kit, scheduler, "third", spoken(9, 9))[0].num_cached == 8


def test_saved_blocks_without_a_state_serve_nobody(kit):
    """Of four blocks that are cached, three are in swap space."""
    scheduler = kit.scheduler(num_blocks=8, num_kept_states=4, num_idle_host_blocks=32)
    ask(kit, scheduler, "first", spoken(17, 17))
    scheduler.release("first")
    _, plans = ask(kit, scheduler, "other", tuple(range(24)), max_total=25)
    assert sum(len(swap.block_ids) for plan in plans for swap in plan.swap_outs) == 3
    scheduler.release("other")
    kept = scheduler._states.pool
    for key in list(kept._state_of):
        kept.forget(key)
    admission, plans = ask(kit, scheduler, "second", spoken(17, 17))
    assert (admission.num_cached, plans[0].swap_ins) == (0, ())


def test_a_state_without_its_blocks_serves_nobody(kit):
    scheduler = kit.scheduler(num_kept_states=4)
    ask(kit, scheduler, "first", spoken(9, 9))
    scheduler.release("first")
    scheduler._pool.release(scheduler._pool.allocate(scheduler._pool.num_available))
    assert ask(kit, scheduler, "second", spoken(9, 9))[0].num_cached == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_kept", "lookahead", "cached"),
    [
        (16, 16, 0, 8),  # the newest token is not computed
        (17, 17, 0, 16),
        (17, 15, 0, 8),
        (20, 15, 0, 0),  # the state at 8 was given up for the one at 16
        (20, 17, 0, 16),
        (17, 16, 1, 8),  # the token that the drafter's KV depends on was cut
        (17, 17, 1, 16),
    ],
)
def test_the_last_state_of_an_answer_is_kept(kit, num_tokens, num_kept, lookahead, cached):
    scheduler = kit.scheduler(num_kept_states=4, lookahead_tokens=lookahead)
    prompt = spoken(6, 6)
    ask(kit, scheduler, "first", prompt, max_total=40)
    while scheduler._running["first"].num_processed < num_tokens:
        kit.step(scheduler)
    scheduler.release("first", num_kept)
    scheduler.check_integrity()
    assert ask(kit, scheduler, "next", (*spoken(6, num_kept), 1, 2, 3))[0].num_cached == cached


def test_one_of_several_windows_in_flight_passes_a_position(kit):
    """The host asks all that may; each of their plans names the same state."""
    scheduler = kit.scheduler(num_kept_states=4, num_speculative_tokens=3)
    ask(kit, scheduler, "first", spoken(6, 6), max_total=40)
    # 7 tokens; the window may pass positions 7 to 10, the next one 8 to 14.
    plans = [scheduler.plan() for _ in range(3)]
    assert [[copy.position for copy in plan.kept_states] for plan in plans] == [[8], [8], [16]]
    assert plans[0].kept_states[0].state == plans[1].kept_states[0].state
    for plan in plans:
        scheduler.process_output(kit.result(plan, accept=3))
    scheduler.check_integrity()


def test_a_failed_request_leaves_no_state(kit):
    scheduler = kit.scheduler(num_kept_states=4)
    scheduler.add(kit.request("first", spoken(9, 9)))
    plans = [scheduler.plan(), scheduler.plan()]
    scheduler.process_output(kit.result(plans[0]))
    scheduler.process_output(kit.result(plans[1], failed=(plans[1].requests[0].slot,)))
    assert not scheduler._states.pool._state_of
    scheduler.check_integrity()


def test_models_without_recurrent_layers_keep_nothing(kit):
    scheduler = kit.scheduler()
    _, (plan,) = ask(kit, scheduler, "first", spoken(18, 18))
    finish(kit, scheduler, "first", 22)
    admission, (other,) = ask(kit, scheduler, "next", spoken(18, 22))
    assert admission.num_cached == 20
    assert (plan.kept_states, other.kept_states, other.restored_states) == ((), (), ())


@pytest.mark.parametrize("cached", [False, True])
def test_an_answer_that_is_not_shared_keeps_no_state(kit, cached):
    scheduler = kit.scheduler(num_kept_states=4, cache_emitted_blocks=not cached)
    _, (plan,) = ask(kit, scheduler, "first", spoken(6, 6), cached=cached)
    while scheduler._running["first"].num_processed < 12:
        assert kit.step(scheduler)[0].kept_states == plan.kept_states == ()
        assert not scheduler._running["first"].held_states
    finish(kit, scheduler, "first", 12)
    assert not scheduler._states.pool._state_of

"""Which blocks of emitted tokens a later prompt may start from."""

import pytest

from sametoken.errors import InvariantError
from sametoken.scheduler import kv_memory
from sametoken.scheduler.block_pool import block_keys
from sametoken.types.outputs import RequestResult, StepResult
from sametoken.types.structured_outputs import MaskFault

PROMPT = tuple(range(100, 106))  # one full block of 4, and two tokens


def run(kit, scheduler, num_tokens, prompt=PROMPT, name="first"):
    """A request until ``num_tokens`` of its own are processed, one by one after the prompt."""
    scheduler.add(kit.request(name, prompt, max_total=40))
    while (requests := scheduler._waiting | scheduler._running)[name].num_processed < num_tokens:
        kit.step(scheduler)
    assert requests[name].num_processed == num_tokens


def spoken(num_tokens, prompt=PROMPT):
    """What the bench's device makes of a prompt: it says 7 and nothing else."""
    return (*prompt, *(7,) * (num_tokens - len(prompt)))


def num_cached(kit, scheduler, prompt):
    scheduler.add(kit.request("next", prompt))
    plan, _ = kit.step(scheduler)
    return plan.admissions[-1].num_cached


def test_a_follow_up_starts_from_the_prompt_and_the_answer(kit):
    scheduler = kit.scheduler()
    run(kit, scheduler, 14)
    scheduler.release("first", 14)
    scheduler.check_integrity()
    assert num_cached(kit, scheduler, (*spoken(14), 1, 2, 3)) == 12
    assert (scheduler.prefix_cache_hits, scheduler.prefix_cache_queries) == (12, 6 + 17)


@pytest.mark.parametrize(
    ("processed", "kept", "lookahead", "cached"),
    [
        (12, 12, 0, 8),  # the newest token has no KV
        (13, 13, 0, 12),
        (13, 12, 0, 12),
        (13, 11, 0, 8),  # the block's last token was cut
        (17, 7, 0, 4),
        (17, 6, 0, 4),  # the prompt alone
        (13, 13, 1, 12),
        (13, 12, 1, 8),  # the token that the drafter's KV depends on was cut
        (17, 13, 1, 12),
    ],
)
def test_only_processed_kept_and_computed_positions_are_entered(
    kit, processed, kept, lookahead, cached
):
    scheduler = kit.scheduler(lookahead_tokens=lookahead)
    run(kit, scheduler, processed)
    scheduler.release("first", kept)
    # It says again what was cut.
    assert num_cached(kit, scheduler, spoken(24)) == cached


def test_a_window_of_accepted_drafts_is_cut_in_its_middle(kit):
    for kept, cached in ((17, 16), (16, 16), (15, 12), (12, 12), (8, 8), (7, 4)):
        scheduler = kit.scheduler(num_speculative_tokens=4, lookahead_slots=3)
        scheduler.add(kit.request("first", PROMPT, max_total=40))
        for _ in range(3):
            kit.step(scheduler, accept=4)
        assert scheduler._running["first"].num_processed == 17
        scheduler.release("first", kept)
        assert num_cached(kit, scheduler, spoken(30)) == cached


def test_a_prompt_block_whose_lookahead_was_emitted_gets_its_key(kit):
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    for kept, cached in ((None, 4), (8, 4), (9, 8)):
        scheduler = kit.scheduler(lookahead_tokens=1)
        run(kit, scheduler, 9, prompt)
        scheduler.release("first", kept)
        assert num_cached(kit, scheduler, spoken(12, prompt)) == cached


def test_a_third_turn_starts_from_both_answers(kit):
    scheduler = kit.scheduler()
    run(kit, scheduler, 14)
    scheduler.release("first", 14)
    second = (*spoken(14), 1, 2, 3)
    run(kit, scheduler, 22, second, name="second")
    scheduler.release("second", 22)
    assert num_cached(kit, scheduler, (*spoken(22, second), 9)) == 20
    scheduler.check_integrity()


def test_of_two_equal_answers_one_is_kept(kit):
    scheduler = kit.scheduler(num_blocks=12)
    kit.add(scheduler, "ab", PROMPT, max_total=20)
    for _ in range(8):
        kit.step(scheduler)
    for name in "ab":
        scheduler.release(name, 14)
        scheduler.check_integrity()
    assert len(scheduler._pool.prefix_cache.blocks()) == 3
    assert num_cached(kit, scheduler, spoken(15)) == 12


@pytest.mark.parametrize(
    ("limits", "kept", "cached"),
    [
        ({}, None, 4),
        ({"cache_emitted_blocks": False}, 14, 4),
        ({"enable_prefix_caching": False}, 14, 0),
    ],
)
def test_otherwise_prompt_blocks_alone_are_cached(kit, limits, kept, cached):
    scheduler = kit.scheduler(**limits)
    run(kit, scheduler, 14)
    scheduler.release("first", kept)
    assert num_cached(kit, scheduler, spoken(17)) == cached


def test_nothing_of_a_running_answer_is_shared(kit):
    scheduler = kit.scheduler()
    run(kit, scheduler, 20)
    assert num_cached(kit, scheduler, spoken(24)) == 4


def test_steps_in_flight_add_nothing_and_their_blocks_are_shared_at_once(kit):
    scheduler = kit.scheduler()
    run(kit, scheduler, 13)
    owned = list(scheduler._running["first"].blocks)
    first, second = scheduler.plan(), scheduler.plan()
    scheduler.release("first", 13)
    scheduler.check_integrity()
    scheduler.add(kit.request("next", spoken(16)))
    third = scheduler.plan()
    assert [admission.num_cached for admission in third.admissions] == [12]
    assert list(third.block_assignments[-1].block_ids[:3]) == owned[:3]
    scheduler.check_integrity()
    for plan in (first, second):
        assert scheduler.process_output(kit.result(plan)) == ()
        scheduler.check_integrity()
    assert [update.request_id for update in scheduler.process_output(kit.result(third))] == ["next"]
    scheduler.release("next")
    assert scheduler.kv_usage == 0


def test_an_abort_inside_the_prompt_keeps_what_was_planned_of_it(kit):
    prompt = tuple(range(20))
    scheduler = kit.scheduler(longest_chunk=9)
    scheduler.add(kit.request("first", prompt))
    kit.step(scheduler)
    scheduler.release("first", 20)
    scheduler.check_integrity()
    assert num_cached(kit, scheduler, prompt) == 8


def test_a_waiting_request_has_nothing_to_keep(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("first", PROMPT))
    scheduler.release("first", len(PROMPT))
    assert num_cached(kit, scheduler, PROMPT) == 0


def crowded(kit):
    """``old`` grows until ``young`` is swapped out with eight tokens of its own."""
    scheduler = kit.scheduler(num_blocks=6)
    scheduler.add(kit.request("old", 11, max_total=24))
    scheduler.add(kit.request("young", (1, 2, 3), max_total=24))
    while not scheduler.num_swapped:
        kit.step(scheduler)
    assert scheduler._swapped["young"].num_processed == 8
    return scheduler


def test_nothing_of_a_swapped_request_is_entered(kit):
    scheduler = crowded(kit)
    scheduler.release("young", 8)
    scheduler.release("old")
    assert num_cached(kit, scheduler, spoken(12, (1, 2, 3))) == 0


def test_a_request_that_came_back_is_entered_like_any_other(kit):
    scheduler = crowded(kit)
    scheduler.release("old")
    kit.step(scheduler)
    scheduler.release("young", 9)
    assert num_cached(kit, scheduler, spoken(12, (1, 2, 3))) == 8
    scheduler.check_integrity()


def test_kept_blocks_go_when_memory_is_needed(kit):
    scheduler = kit.scheduler(num_blocks=10)
    run(kit, scheduler, 14)
    scheduler.release("first", 14)
    assert scheduler.kv_usage == 0
    run(kit, scheduler, 31, tuple(range(200, 230)), name="other")
    scheduler.release("other")
    # "other" took eight blocks of ten; seven were free, and the chain lost its far end.
    assert num_cached(kit, scheduler, spoken(16)) == 8


def test_nothing_of_a_poisoned_request_is_entered(kit):
    scheduler = kit.scheduler()
    run(kit, scheduler, 14)
    plan = scheduler.plan()
    [update] = scheduler.process_output(kit.result(plan, failed=(0,)))
    assert update.failed
    scheduler.release("first", 14)  # the serving process, which hears of it afterwards
    assert num_cached(kit, scheduler, spoken(17)) == 0


def test_a_released_request_that_turns_out_poisoned_takes_its_blocks_back(kit):
    scheduler = kit.scheduler()
    run(kit, scheduler, 14)
    plan = scheduler.plan()
    scheduler.release("first", 14)
    assert scheduler.process_output(kit.result(plan, failed=(0,))) == ()
    scheduler.check_integrity()
    assert num_cached(kit, scheduler, spoken(17)) == 0


def test_a_request_without_a_valid_token_leaves_its_prompt_to_others(kit):
    scheduler = kit.scheduler()
    run(kit, scheduler, 14)
    plan = scheduler.plan()
    failed = RequestResult(0, 0, 0, (), failed=True, mask_fault=MaskFault.NO_VALID_TOKEN)
    [update] = scheduler.process_output(StepResult(plan.step_id, (failed,)))
    assert update.failed
    assert num_cached(kit, scheduler, spoken(17)) == 4


@pytest.mark.parametrize("kept", [0, 5, 9])
def test_impossible_counts_are_refused(kit, kept):
    scheduler = kit.scheduler()
    run(kit, scheduler, 8)
    scheduler.plan()
    with pytest.raises(InvariantError, match=f"cannot keep {kept} tokens: its prompt has 6"):
        scheduler.release("first", kept)


def test_an_end_computes_no_key_of_the_prompt_again(kit, monkeypatch):
    scheduler = kit.scheduler(lookahead_tokens=1)
    run(kit, scheduler, 14)
    lengths = []

    def noted(tokens, *others):
        lengths.append(len(tokens))
        return block_keys(tokens, *others)

    monkeypatch.setattr(kv_memory, "block_keys", noted)
    scheduler.release("first", 14)
    # All but the block of four whose key, lookahead and all, the prompt has.
    assert lengths == [10]
    assert num_cached(kit, scheduler, (*spoken(14), 1, 2, 3)) == 12

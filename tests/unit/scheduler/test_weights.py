"""Weights that change between steps: which versions a request has, and whose KV it may read."""

from __future__ import annotations

import pytest

from sametoken.errors import InvariantError

PROMPT = tuple(range(100, 113))


def versions_of(updates):
    return {update.request_id: update.weight_versions for update in updates}


def test_a_request_has_the_versions_of_its_first_step_and_of_its_newest(kit):
    scheduler = kit.scheduler(num_blocks=7, max_num_seqs=3)
    scheduler.add(kit.request("old", 11, max_total=24))
    scheduler.add(kit.request("swapped", 11, max_total=24))
    while not scheduler.num_swapped:
        kit.step(scheduler)
    scheduler.add(kit.request("waiting", 2))
    scheduler.begin_weights(3)
    assert scheduler.weight_version == 3
    scheduler.add(kit.request("new", 2))
    assert versions_of(kit.step(scheduler)[1]) == {"old": (0, 3)}
    scheduler.begin_weights(4)
    scheduler.add(kit.request("newest", 2))
    scheduler.release("old")
    assert versions_of(kit.step(scheduler)[1]) == {"swapped": (0, 4)}
    scheduler.release("swapped")
    assert versions_of(kit.step(scheduler)[1]) == dict.fromkeys(
        ("waiting", "new", "newest"), (4, 4)
    )


def test_weights_do_not_change_under_a_step_and_versions_grow(kit):
    scheduler = kit.scheduler()
    scheduler.begin_weights(2)
    for version in (1, 2):
        with pytest.raises(InvariantError, match=f"version {version} after 2"):
            scheduler.begin_weights(version)
    scheduler.add(kit.request("a", 3))
    scheduler.plan()
    with pytest.raises(InvariantError):
        scheduler.begin_weights(3)
    with pytest.raises(InvariantError, match="under steps in flight"):
        scheduler.begin_drafter_weights()


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_nobody_reads_kv_of_older_weights(kit, drafter, waits):
    """Nor is it copied to swap space, as a prefix that somebody may ask for."""
    scheduler = kit.scheduler(num_blocks=8, num_idle_host_blocks=32)

    def ask(name, prompt, tokens=1):
        scheduler.add(kit.request(name, prompt, max_total=len(prompt) + tokens))

    def begin():
        if drafter:
            scheduler.begin_drafter_weights()
        else:
            scheduler.begin_weights(scheduler.weight_version + 1)

    begin()
    # This one's blocks are in swap space by then.
    ask("saved", range(17))
    kit.step(scheduler)
    scheduler.release("saved")
    ask("other", range(50, 81))
    assert kit.step(scheduler)[0].swap_outs
    scheduler.release("other")
    scheduler.forget_prefixes()
    ask("before", PROMPT, 8)
    kit.step(scheduler)
    if waits:
        ask("after", PROMPT)
    begin()
    if not waits:
        ask("after", PROMPT)
    # The answer may be cached that it gets from now on.
    assert scheduler._waiting["after"].num_updates == 2
    # What was computed in part before is nobody's either.
    scheduler.release("before", len(PROMPT) + 1)
    plan, _ = kit.step(scheduler)
    assert [one.num_cached for one in plan.admissions] == [0]
    scheduler.release("after")
    ask("again", PROMPT)
    plan, _ = kit.step(scheduler)
    assert [one.num_cached for one in plan.admissions] == [12]
    scheduler.release("again")
    ask("saved", range(17))
    plan, _ = kit.step(scheduler)
    assert [one.num_cached for one in plan.admissions] == [0]
    assert (plan.swap_ins, plan.swap_outs) == ((), ())

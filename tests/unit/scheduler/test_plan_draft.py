"""Which rows a step has: windows, drafts, chunks, the row budget, and whose turn it is."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.errors import InvariantError
from sametoken.scheduler import plan_draft
from sametoken.scheduler.draft_limits import StepReads
from sametoken.scheduler.plan_draft import SHARE, RowBudget
from sametoken.scheduler.request_state import RequestState
from sametoken.types.fast_prompts import FastForm
from sametoken.types.layout import StepShape
from sametoken.types.length_bound import LenBound
from sametoken.types.outputs import StepResult


def test_nothing_to_do_is_no_plan(kit):
    scheduler = kit.scheduler()
    assert scheduler.plan() is None
    assert not scheduler.has_unfinished


def test_a_prompt_takes_all_that_is_left_and_its_end_samples(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=16)
    scheduler.add(kit.request("r", 39))
    plans = [scheduler.plan() for _ in range(4)]
    assert [kit.rows(plan) for plan in plans] == [
        [(0, 16, 0, False)],
        [(0, 16, 0, False)],
        [(0, 7, 0, True)],
        [(0, 1, 0, True)],
    ]
    assert [plan.step_id for plan in plans] == [0, 1, 2, 3]
    assert [len(plan.admissions) for plan in plans] == [1, 0, 0, 0]
    assert plans[0].admissions[0].num_cached == 0


def test_the_fast_form_ends_before_the_last_token(kit):
    """Its chunks come last, so that all rows before them are in the usual form."""
    scheduler = kit.scheduler(max_num_batched_tokens=16, fast_form=FastForm(9))
    scheduler.add(kit.request("long", 20))
    scheduler.add(kit.request("short", 8))
    plans = [kit.step(scheduler)[0] for _ in range(3)]
    assert [kit.rows(plan) for plan in plans] == [
        [(0, 16, 0, False)],
        [(1, 8, 0, True), (0, 3, 0, False)],
        [(0, 1, 0, True), (1, 1, 0, True)],
    ]
    ends = [[one.expanded_to for one in plan.requests] for plan in plans]
    assert ends == [[16], [0, 19], [0, 0]]


def test_chunks_in_the_fast_form_begin_and_end_at_multiples(kit):
    """What a step has beside them goes to others; the last one ends with the prompt."""
    scheduler = kit.scheduler(max_num_batched_tokens=22, fast_form=FastForm(9, 8))
    scheduler.add(kit.request("long", 39))
    scheduler.add(kit.request("short", 7))
    plans = [kit.step(scheduler)[0] for _ in range(3)]
    assert [kit.rows(plan) for plan in plans] == [
        [(0, 16, 0, False), (1, 6, 0, False)],
        [(1, 1, 0, True), (0, 16, 0, False)],
        [(1, 1, 0, True), (0, 7, 0, True)],
    ]
    assert not any(one.expanded_to for plan in plans for one in plan.requests)


@pytest.mark.parametrize(("rows", "starves"), [(40, False), (36, True)])
def test_a_share_of_a_chunk_keeps_a_prompt_from_starving(kit, rows, starves):
    """Beside decodes that fill steps, and short prompts that take their part of its share."""
    scheduler = kit.scheduler(
        max_num_seqs=64, num_blocks=999, max_num_batched_tokens=rows, longest_chunk=rows,
        max_model_len=999, fast_form=FastForm(9, 8),
    )  # fmt: skip
    for index in range(50):
        scheduler.add(kit.request(f"d{index}", 1, max_total=99))
    for _ in range(4):
        kit.step(scheduler)
    scheduler.add(kit.request("long", 65))
    chunks = []
    for index in range(16):
        names = [f"s{index}{letter}" for letter in "ab"]
        for name in names:
            scheduler.add(kit.request(name, 1, max_total=2))
        plan, updates = kit.step(scheduler)
        chunks += [one.num_query for one in plan.requests if one.num_query > 1]
        for update in updates:
            if update.request_id[0] == "s":
                scheduler.release(update.request_id)
    assert chunks == ([] if starves else [8] * 8)


@pytest.mark.parametrize(("length", "rows"), [(16, [16]), (17, [16, 1]), (18, [18])])
def test_a_prompt_s_last_token_alone_is_no_chunk(kit, length, rows):
    """It would be taken for a window."""
    scheduler = kit.scheduler(fast_form=FastForm(9, 8))
    scheduler.add(kit.request("one", length))
    plans = [kit.step(scheduler)[0] for _ in rows]
    assert [one.num_query for plan in plans for one in plan.requests] == rows
    assert [one.samples for one in plans[-1].requests] == [True]


LONG = {
    "max_num_batched_tokens": 32,
    "usual_rows": 16,
    "longest_chunk": 32,
    "num_blocks": 64,
    "max_model_len": 99,
}


def chunks_of(kit, scheduler, count):
    return [[rows for _, rows, *_ in kit.rows(kit.step(scheduler)[0])] for _ in range(count)]


def test_a_prompt_of_expanded_latents_has_the_longest_steps(kit):
    """Each step expands all of them anew, whoever decodes; others have the usual rows."""
    scheduler = kit.scheduler(**LONG, fast_form=FastForm(40))
    scheduler.add(kit.request("short", 3, max_total=60))
    kit.step(scheduler)
    scheduler.add(kit.request("expanded", 75))
    assert chunks_of(kit, scheduler, 5) == [[1, 31], [1, 31], [1, 12], [1, 1], [1, 1]]
    scheduler.add(kit.request("absorbed", 39))
    assert chunks_of(kit, scheduler, 2) == [[1, 1, 14], [1, 1, 14]]
    scheduler = kit.scheduler(**LONG, fast_form=FastForm(40, 8))
    scheduler.add(kit.request("in chunks", 75))
    assert chunks_of(kit, scheduler, 2) == [[16], [16]]


def test_a_long_prompt_of_a_model_with_experts_has_the_longest_steps_while_nobody_decodes(kit):
    experts = StepReads(32, experts_bytes=64, experts_share=0.5)
    for reads, first, beside in ((experts, 32, 15), (StepReads(32), 16, 15)):
        scheduler = kit.scheduler(**LONG, reads=reads)
        scheduler.add(kit.request("long", 48))
        assert chunks_of(kit, scheduler, 1) == [[first]]
        chunks_of(kit, scheduler, 1 if first == 32 else 2)
        scheduler.add(kit.request("next", 48))
        assert chunks_of(kit, scheduler, 1) == [[1, beside]]


def test_a_prompt_begins_in_what_the_one_before_leaves(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=13)
    scheduler.add(kit.request("a", 8))
    scheduler.add(kit.request("b", 17))
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 8, 0, True), (1, 5, 0, False)]
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 0, True), (1, 12, 0, True)]


@pytest.mark.parametrize(
    ("lengths", "first", "second"),
    [
        # The last prompt that is needed for 20 rows is whole.
        ((8, 8, 8, 8), [8, 8, 8], [8]),
        ((20, 4), [20], [4]),
        ((20, 20), [20], [20]),
        ((19, 4), [19, 4], None),
        # Where a step more is needed anyway, each is as full as can be.
        ((9, 9, 9, 9, 9), [9, 9, 9, 9, 4], [5]),
        ((30, 30, 8), [30, 10], [20]),
    ],
)
def test_prompts_that_fit_one_step_end_in_two_if_the_first_keeps_the_device_busy(
    kit, lengths, first, second
):
    sizes = {"max_num_batched_tokens": 40, "busy_rows": 20, "longest_chunk": 40}
    scheduler = kit.scheduler(**sizes, max_num_seqs=8)
    for index, length in enumerate(lengths):
        scheduler.add(kit.request("abcde"[index], length))
    assert [rows for _, rows, *_ in kit.rows(kit.step(scheduler)[0])] == first
    if second:
        chunks = [rows for _, rows, *_ in kit.rows(kit.step(scheduler)[0]) if rows > 1]
        assert chunks == second


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        # Half of what waits, at least the usual rows and at most a whole step.
        ([4] * 16, [[4] * 8, [4] * 4, [4] * 4]),
        ([4] * 13, [[4] * 6 + [2], [2, 4, 4, 4, 2], [2, 4, 4]]),
        ([4] * 8, [[4] * 4, [4] * 4]),
        ([16] * 4, [[16] * 2, [16], [16]]),
        # A long prompt has no more than it always had, whoever waits behind it.
        ([60, 20, 20], [[16], [16], [16], [12, 4], [16], [16], [4]]),
        ([30, *[4] * 8], [[12, 4], [12, 4], [6, 4, 4, 2], [2, 4, 4, 4]]),
        ([*[4] * 16, 30], [[4] * 8, [4] * 4, [4] * 4, [16], [14]]),
    ],
)
def test_steps_are_longer_than_usual_while_a_crowd_of_short_prompts_waits(kit, lengths, steps):
    sizes = {"max_num_batched_tokens": 32, "usual_rows": 16, "longest_chunk": 32}
    scheduler = kit.scheduler(**sizes, max_num_seqs=20, num_blocks=64)
    for index, length in enumerate(lengths):
        # One token each: no decoding request takes a row.
        scheduler.add(kit.request(f"{index}", length, max_total=length + 1))
    found = []
    while plan := scheduler.plan():
        found.append([rows for _, rows, *_ in kit.rows(plan)])
        for update in scheduler.process_output(kit.result(plan)):
            scheduler.release(update.request_id)
    assert found == steps


def test_drafts_make_no_step_longer_than_usual(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=32, usual_rows=16, num_speculative_tokens=8)
    scheduler.add(kit.request("short", 4, max_total=40))
    kit.step(scheduler)
    scheduler.add(kit.request("long", 40, max_total=41))
    assert kit.rows(scheduler.plan()) == [(0, 1, 8, True), (1, 7, 0, False)]


def test_nobody_waits_for_a_prompt_that_does_not_end_in_the_step(kit):
    sizes = {"max_num_batched_tokens": 40, "busy_rows": 20, "longest_chunk": 8}
    scheduler = kit.scheduler(**sizes)
    for name, length in (("long", 30), ("short", 4)):
        scheduler.add(kit.request(name, length))
    assert [rows for _, rows, *_ in kit.rows(scheduler.plan())] == [8, 4]


sizes_of_steps = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.integers(1, 40),
        "longest_chunk": st.integers(1, 20),
        "usual_rows": st.integers(1, 50),
        "busy_rows": st.integers(1, 20),
        "num_speculative_tokens": st.integers(0, 3),
    }
)


@given(sizes_of_steps, st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=12))
def test_rows_of_any_sizes_and_prompts_are_divided_by_the_rules(kit, sizes, arrivals):
    limits = kit.limits(**sizes, max_num_seqs=12)
    rows, longest = limits.max_num_batched_tokens, min(limits.longest_chunk, limits.usual_rows)
    budget, requests = RowBudget(limits), []
    # The oldest prompt goes on in every second step at least, by a row at least.
    for step_id in range(10 + 2 * sum(length for _, length in arrivals)):
        for arrival, length in arrivals:
            if arrival == step_id:
                request = kit.request("r", length, max_total=length + 30)
                requests.append(RequestState(request, (), LenBound.known(length)))
        prompts = [request for request in requests if request.prefilling]
        turns = budget.share(step_id, requests)
        chunks = {turn.request: turn.num_query for turn in turns if turn.request in prompts}
        total = sum(turn.num_rows for turn in turns)
        assert total <= rows
        assert all(turn.num_rows >= 1 for turn in turns)
        assert all(chunk <= min(one.num_left, longest) for one, chunk in chunks.items())
        num_decoding = len(requests) - len(prompts)
        assert num_decoding > rows - max(1, rows // 4) or len(turns) - len(chunks) == num_decoding
        if prompts and (num_decoding < rows or step_id % 2):
            assert prompts[0] in chunks
        # First come, first served among equals.
        for one, other in itertools.combinations(prompts, 2):
            if one.num_left == other.num_left:
                assert chunks.get(one, 0) >= chunks.get(other, 0)
        # Whoever waits does so for a full step, or for prompts that end and keep it busy.
        if any(chunks.get(one, 0) < min(one.num_left, longest) for one in prompts):
            ended = all(one.num_left == chunk for one, chunk in chunks.items())
            num_rows = sum(chunks.values())
            busy = ended and num_rows >= limits.busy_rows
            assert total >= min(rows, limits.usual_rows) or busy
        for turn in turns:
            turn.request.last_step = step_id
            if turn.request.prefilling:
                turn.request.position += turn.num_query
    assert len(requests) == len(arrivals)
    assert not any(request.prefilling for request in requests)


def test_one_prompt_may_have_a_longest_chunk(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=16, longest_chunk=6)
    kit.add(scheduler, "abc", 20)
    # What one may not take, the next one may.
    assert kit.rows(kit.step(scheduler)[0]) == [
        (0, 6, 0, False),
        (1, 6, 0, False),
        (2, 4, 0, False),
    ]


def test_windows_come_before_chunks(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=12, num_speculative_tokens=2)
    scheduler.add(kit.request("long", 19, max_total=40))
    scheduler.add(kit.request("short", 2, max_total=40))
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 10, 0, False), (1, 2, 0, True)]
    # The older one's chunk stands behind the younger one's window.
    scheduler.add(kit.request("next", 9, max_total=40))
    assert kit.rows(kit.step(scheduler)[0]) == [(1, 1, 2, True), (0, 9, 0, True)]
    scheduler.add(kit.request("other", 20, max_total=40))
    assert kit.rows(kit.step(scheduler)[0])[:2] == [(0, 1, 2, True), (1, 1, 2, True)]


def test_a_last_chunk_of_one_token_is_a_window_and_a_first_one_is_not(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=8)
    scheduler.add(kit.request("a", 9))
    kit.step(scheduler)
    scheduler.add(kit.request("b", 30))
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 0, True), (1, 7, 0, False)]
    scheduler = kit.scheduler(max_num_batched_tokens=2)
    scheduler.add(kit.request("a", 2))
    kit.step(scheduler)
    scheduler.add(kit.request("b", 2))
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 0, True), (1, 1, 0, False)]


def test_nobody_begins_while_none_is_admitted(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("old", 3))
    kit.step(scheduler)
    scheduler.admits = False
    scheduler.add(kit.request("new", 3))
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 0, True)]
    scheduler.admits = True
    assert kit.step(scheduler)[0].admissions


def test_an_admission_has_what_its_request_has(kit):
    asked = dataclasses.replace(
        kit.request("r", 3),
        stop_token_ids=(1, 2),
        bad_words_token_ids=((3, 4),),
        grammar=object(),
        prompt_temperature=2.0,
        adapter=5,
    )
    scheduler = kit.scheduler()
    scheduler.add(asked)
    [admission] = scheduler.plan().admissions
    names, others = ({one.name for one in dataclasses.fields(it)} for it in (admission, asked))
    assert len(names & others) > 7
    for name in names & others:
        assert getattr(admission, name) == getattr(asked, name), name


def test_chunks_of_several_requests_share_a_step(kit):
    scheduler = kit.scheduler()
    kit.add(scheduler, "abc", 5)
    assert kit.rows(scheduler.plan()) == [(0, 5, 0, True), (1, 5, 0, True), (2, 5, 0, True)]


def test_admission_is_first_come_first_served(kit):
    scheduler = kit.scheduler(max_num_seqs=1)
    kit.add(scheduler, "abc", 3, max_total=4)
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
    assert [row.draft_limit for plan in plans for row in plan.requests] == [0, 4, 2]
    assert scheduler.plan() is None
    scheduler.process_output(kit.result(plans[0]))
    assert scheduler.plan() is None
    # One token came where five might have: there is room again.
    scheduler.process_output(kit.result(plans[1], accept=0))
    assert [row.draft_limit for row in scheduler.plan().requests] == [3]


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
    scheduler = kit.scheduler(max_num_batched_tokens=9, num_speculative_tokens=4)
    kit.add(scheduler, "abc", 3, max_total=30)
    kit.step(scheduler)
    plan, _ = kit.step(scheduler)
    assert kit.rows(plan) == [(0, 1, 2, True), (1, 1, 2, True), (2, 1, 2, True)]


def test_drafts_that_one_cannot_use_go_to_the_others(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=9, num_speculative_tokens=4)
    for name, own in (("a", None), ("b", 0), ("c", 1)):
        scheduler.add(kit.request(name, 3, max_total=30, max_drafts=own))
    kit.step(scheduler)
    plan, _ = kit.step(scheduler)
    assert [row.draft_limit for row in plan.requests] == [4, 0, 1]


def test_decodes_take_turns_when_not_all_fit(kit):
    scheduler = kit.scheduler(max_num_seqs=5, max_num_batched_tokens=2, num_speculative_tokens=3)
    kit.add(scheduler, "abcde", 2, max_total=40)
    while scheduler.num_waiting or any(state.prefilling for state in scheduler._running.values()):
        kit.step(scheduler)
    steps = [[row.slot for row in kit.step(scheduler)[0].requests] for _ in range(12)]
    assert all(len(slots) == 2 for slots in steps)
    # Five requests, two rows: each is served once in any three steps.
    for start in range(10):
        assert {slot for slots in steps[start : start + 3] for slot in slots} == {0, 1, 2, 3, 4}


def test_drafts_leave_a_quarter_of_the_step_to_prompts(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=24, num_speculative_tokens=8)
    kit.add(scheduler, "abc", 3, max_total=60)
    kit.step(scheduler)
    assert [row.draft_limit for row in kit.step(scheduler)[0].requests] == [7, 7, 7]
    scheduler.add(kit.request("long", 30, max_total=40))
    for _ in range(3):
        assert kit.rows(kit.step(scheduler)[0]) == [
            (0, 1, 5, True),
            (1, 1, 5, True),
            (2, 1, 5, True),
            (3, 6, 0, False),
        ]


def test_what_a_prompt_does_not_need_of_its_quarter_goes_to_drafts(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=24, num_speculative_tokens=16)
    kit.add(scheduler, "ab", 3, max_total=60)
    kit.step(scheduler)
    scheduler.add(kit.request("short", 2, max_total=40))
    assert kit.rows(kit.step(scheduler)[0]) == [(0, 1, 10, True), (1, 1, 10, True), (2, 2, 0, True)]


def test_decodes_that_fill_the_step_alternate_with_prompts(kit):
    scheduler = kit.scheduler(max_num_seqs=9, num_blocks=60, max_num_batched_tokens=8)
    kit.add(scheduler, "abcdefgh", 1, max_total=60)
    kit.step(scheduler)
    scheduler.add(kit.request("long", 7, max_total=30))
    steps = [kit.rows(kit.step(scheduler)[0]) for _ in range(7)]
    chunks = [[row[1] for row in rows if row[0] == 8] for rows in steps]
    assert chunks == [[2], [], [2], [], [2], [], [1]]
    assert all(len(rows) == 8 for rows in steps[1::2])
    # Beside the prompt's two rows six of eight go on; nobody misses two steps in a row.
    for one, other in itertools.pairwise(steps):
        assert {*range(8)} <= {row[0] for row in (*one, *other)}


def test_decodes_that_leave_a_prompt_less_than_a_quarter_alternate_with_it(kit):
    """With a slot for every row, it holds the last one: they never fill the step."""
    scheduler = kit.scheduler(max_num_seqs=16, num_blocks=80, max_num_batched_tokens=16)
    for index in range(15):
        scheduler.add(kit.request(f"{index}", 1, max_total=60))
    kit.step(scheduler)
    scheduler.add(kit.request("long", 12, max_total=30))
    steps = [kit.rows(kit.step(scheduler)[0]) for _ in range(4)]
    assert [[row[1] for row in rows if row[0] == 15] for rows in steps] == [[4], [1], [4], [1]]
    for one, other in itertools.pairwise(steps):
        assert {*range(15)} <= {row[0] for row in (*one, *other)}


def test_one_row_is_shared_by_turns(kit):
    scheduler = kit.scheduler(max_num_batched_tokens=1)
    scheduler.add(kit.request("a", 1, max_total=30))
    kit.step(scheduler)
    scheduler.add(kit.request("b", 3, max_total=30))
    assert [kit.step(scheduler)[0].requests[0].slot for _ in range(6)] == [1, 0, 1, 0, 1, 0]


def test_a_stream_of_prompts_does_not_starve_decoding(kit):
    scheduler = kit.scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(kit.request("first", 3, max_total=30))
    kit.step(scheduler)
    for count in range(20):
        if scheduler.num_running + scheduler.num_waiting < 2:
            scheduler.add(kit.request(f"prompt {count}", 9, max_total=10))
        plan, updates = kit.step(scheduler)
        assert 0 in [row.slot for row in plan.requests]
        for update in updates:
            if update.request_id != "first":
                scheduler.release(update.request_id)


def test_small_prompts_pass_a_huge_one_within_a_quarter(kit):
    scheduler = kit.scheduler(max_num_seqs=6, max_num_batched_tokens=16)
    scheduler.add(kit.request("huge", 60, max_total=64))
    for name, length in (("a", 3), ("large", 5), ("b", 1), ("c", 2)):
        scheduler.add(kit.request(name, length, max_total=40))
    # "large" needs more than the four rows, and "c" more than is left of them.
    plan, _ = kit.step(scheduler)
    assert kit.rows(plan) == [(2, 1, 0, True), (0, 12, 0, False), (1, 3, 0, True)]
    assert [admission.request_id for admission in plan.admissions] == ["huge", "a", "b"]
    plan, _ = kit.step(scheduler)
    assert [admission.request_id for admission in plan.admissions] == ["c"]
    assert kit.rows(plan)[2:] == [(0, 12, 0, False), (3, 2, 0, True)]
    # Nobody small is left: the huge one has all that is left.
    plan, _ = kit.step(scheduler)
    assert kit.rows(plan)[3:] == [(0, 13, 0, False)]


def test_whoever_overtakes_leaves_the_others_a_slot(kit):
    scheduler = kit.scheduler(max_num_seqs=2, max_num_batched_tokens=16)
    for name, length in (("huge", 40), ("large", 10), ("small", 2)):
        scheduler.add(kit.request(name, length, max_total=60))
    admitted = []
    while scheduler.num_waiting > 1:
        admitted += [one.request_id for one in kit.step(scheduler)[0].admissions]
    assert admitted == ["huge", "large"]


def test_nobody_overtakes_a_prompt_that_lacks_blocks(kit):
    scheduler = kit.scheduler(num_blocks=20, max_num_batched_tokens=16)
    scheduler.add(kit.request("huge", 50, max_total=60))
    kit.step(scheduler)
    kit.step(scheduler)
    scheduler.add(kit.request("large", 46, max_total=60))
    scheduler.add(kit.request("small", 2, max_total=60))
    admitted = []
    while not admitted:
        admitted = [one.request_id for one in kit.step(scheduler)[0].admissions]
        for name in [name for name, state in scheduler._running.items() if state.at_limit]:
            scheduler.release(name)
    assert admitted == ["large", "small"]


def test_the_update_carries_the_verdict(kit):
    scheduler = kit.scheduler(num_speculative_tokens=3, longest_chunk=8)
    scheduler.add(kit.request("r", 12, max_total=30))
    assert kit.step(scheduler)[1] == ()
    [first] = kit.step(scheduler)[1]
    assert (first.token_ids, first.samples, first.num_cached) == ((7,), True, 0)
    [second] = kit.step(scheduler, accept=2)[1]
    assert (second.num_drafts, second.num_accepted, second.token_ids) == (3, 2, (7, 7, 7))


def test_prompt_logprobs_of_a_chunk_make_an_update(kit):
    scheduler = kit.scheduler(longest_chunk=8)
    scheduler.add(kit.request("r", 12, prompt_logprobs=0))
    plan = scheduler.plan()
    entry = {3: None}
    row = kit.result(plan).requests[0]._replace(prompt_logprobs=(entry,))
    [update] = scheduler.process_output(StepResult(plan.step_id, (row,)))
    assert update.token_ids == ()
    assert not update.samples
    assert update.prompt_logprobs == (entry,)


def test_results_are_settled_in_step_order(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("r", 12))
    first, second = scheduler.plan(), scheduler.plan()
    with pytest.raises(InvariantError, match="result of step 1 arrived, expected 0"):
        scheduler.process_output(kit.result(second))
    scheduler.process_output(kit.result(first))
    with pytest.raises(InvariantError, match="result of step 0 arrived, expected 1"):
        scheduler.process_output(kit.result(first))
    scheduler.process_output(kit.result(second))
    with pytest.raises(InvariantError, match="expected none"):
        scheduler.process_output(kit.result(second))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"num_drafts": 3}, "0 of 3 drafts where at most 2"),
        ({"num_accepted": 2, "token_ids": (7, 7)}, "emitted 2 tokens, expected 3"),
    ],
)
def test_a_verdict_that_the_row_cannot_have_is_refused(kit, changes, cause):
    scheduler = kit.scheduler(num_speculative_tokens=2)
    scheduler.add(kit.request("r", 3))
    kit.step(scheduler)
    plan = scheduler.plan()
    with pytest.raises(InvariantError, match="has 0 requests, its plan 1"):
        scheduler.process_output(StepResult(plan.step_id, ()))
    bad = kit.result(plan).requests[0]._replace(**changes)
    with pytest.raises(InvariantError, match=cause):
        scheduler.process_output(StepResult(plan.step_id, (bad,)))


def test_equal_calls_give_equal_plans(kit):
    def run():
        scheduler = kit.scheduler(num_blocks=8, num_speculative_tokens=2)
        kit.add(scheduler, "abcd", 6, max_total=20)
        return [kit.step(scheduler, accept=1)[0] for _ in range(8)]

    assert run() == run()


class Load:
    """Requests of mixed lengths come and go; every plan is held against the policy."""

    def __init__(self, kit, seed):
        self.kit, self.random = kit, random.Random(seed)
        self.rows = self.random.choice([16, 24, 40])
        self.slots = self.random.choice([4, 8, 12])
        self.scheduler = kit.scheduler(
            max_num_seqs=self.slots,
            max_num_batched_tokens=self.rows,
            longest_chunk=self.rows,
            num_blocks=400,
            max_model_len=200,
            num_speculative_tokens=self.random.choice([0, 3, 8]),
            adaptive_drafts=self.random.random() < 0.5,
            enable_prefix_caching=False,
            captured_shapes=self.random.choice([(), self.captured_shapes()]),
        )
        self.arrived, self.answered = set(), set()
        self.num_full = self.num_overtaken = 0

    def captured_shapes(self):
        """Of windows alone, and with two prompts: half a step and a whole one."""
        return tuple(
            StepShape(self.slots + chunks, rows, rows, self.slots, 9, rows)
            for rows in (self.rows // 2, self.rows)
            for chunks in (0, 2)
        )

    def add(self):
        name = f"r{len(self.arrived)}"
        length = self.random.choice([1, 2, 3, 5, 9, 30, 150])
        self.arrived.add(name)
        total = length + self.random.randint(1, 30)
        self.scheduler.add(self.kit.request(name, length, max_total=total))

    def step(self):
        waiting = list(self.scheduler._waiting)
        running = list(self.scheduler._running.values())
        lacked = {state.request.request_id: state.num_left for state in running}
        lacked |= {n: state.prompt_len for n, state in self.scheduler._waiting.items()}
        decoding = [s.slot for s in running if not s.prefilling and not s.at_limit]
        free_slots = len(self.scheduler._free_slots)
        plan = self.scheduler.plan()
        if plan is None:
            assert not lacked
            return
        name_of = {s.slot: n for n, s in self.scheduler._running.items()}
        rows = {row.slot: row for row in plan.requests}
        total = sum(row.num_query + row.draft_limit for row in plan.requests)
        assert total <= self.rows
        # Every decode is served in every step: there are fewer of them than rows.
        assert set(decoding) <= set(rows)
        chunks = {n: rows[s].num_query for s, n in name_of.items() if s in rows}
        chunks = {n: chunk for n, chunk in chunks.items() if lacked[n]}
        self.check_prompts(chunks, lacked, waiting[:free_slots], total)
        updates = self.scheduler.process_output(
            self.kit.result(plan, self.random.randint(0, 8), proposed=self.random.randint(0, 8))
        )
        self.scheduler.check_integrity()
        for update in updates:
            name = update.request_id
            self.answered.add(name)
            if self.scheduler._running[name].at_limit:
                self.scheduler.release(name)

    def check_prompts(self, chunks, lacked, in_reach, total):
        could = [n for n in lacked if lacked[n] and (n in in_reach or n in self.scheduler._running)]
        if not could:
            return
        prompt_rows = sum(chunks.values())
        left_over = [n for n in could if chunks.get(n, 0) < lacked[n]]
        if not left_over:
            return
        # Not all prompts ended, so the step is full, and prompts had their share.
        self.num_full += 1
        assert total == self.rows
        assert prompt_rows >= self.rows // SHARE
        oldest = left_over[0]
        before = sum(chunks[n] for n in could[: could.index(oldest)])
        room = prompt_rows - before
        overtakers = [n for n in could[could.index(oldest) + 1 :] if n in chunks]
        self.num_overtaken += len(overtakers)
        taken = chunks.get(oldest, 0)
        assert taken == room - sum(chunks[n] for n in overtakers)
        assert taken >= room - room // SHARE
        for name in overtakers:
            assert chunks[name] == lacked[name], "whoever overtakes ends"


def test_drafts_take_no_more_sampled_rows_than_a_step_may_have(kit, monkeypatch):
    monkeypatch.setattr(plan_draft, "MOST_SAMPLED_ROWS", 12)
    scheduler = kit.scheduler(num_speculative_tokens=8, num_blocks=64)
    kit.add(scheduler, "abc", 3, max_total=40)
    kit.step(scheduler)
    scheduler.add(kit.request("d", 20))
    plan, _ = kit.step(scheduler)
    # Three decoding rows, the end of a prompt, and eight drafts among three requests.
    assert [row.draft_limit for row in plan.requests] == [2, 3, 3, 0]
    assert plan.requests[-1].num_query == 20
    monkeypatch.setattr(plan_draft, "MOST_SAMPLED_ROWS", 1)
    plan, _ = kit.step(scheduler)
    assert [row.draft_limit for row in plan.requests] == [0] * 4


def test_every_step_of_a_random_load_keeps_the_policy(kit):
    num_full = num_overtaken = 0
    for seed in range(40):
        load = Load(kit, seed)
        for _ in range(150):
            if load.random.random() < 0.25:
                load.add()
            load.step()
        for _ in range(600):
            if not load.scheduler.has_unfinished:
                break
            load.step()
        assert not load.scheduler.has_unfinished
        assert load.answered == load.arrived
        num_full += load.num_full
        num_overtaken += load.num_overtaken
    assert num_full > 500
    assert num_overtaken > 100


def test_small_prompts_behind_a_huge_one_start_within_one_step_and_it_keeps_three_quarters(kit):
    scheduler = kit.scheduler(
        max_num_seqs=64,
        max_num_batched_tokens=64,
        num_blocks=800,
        max_model_len=2000,
        enable_prefix_caching=False,
    )
    scheduler.add(kit.request("huge", 1900, max_total=1901))
    answered, steps = set(), 0
    while scheduler.num_running == 0 or scheduler._running["huge"].prefilling:
        scheduler.add(kit.request(f"small {steps}", 8, max_total=9))
        plan, updates = kit.step(scheduler)
        steps += 1
        names = {update.request_id for update in updates}
        assert f"small {steps - 1}" in names, "answered in the step after it came"
        answered |= names - {"huge"}
        for name in names - {"huge"}:
            scheduler.release(name)
        if steps > 1 and scheduler._running["huge"].prefilling:
            assert max(row.num_query for row in plan.requests) >= 48
    assert len(answered) == steps
    assert steps <= 1900 // 48 + 1


def test_nobody_starves_in_a_crowd_of_more_requests_than_rows(kit):
    scheduler = kit.scheduler(
        max_num_seqs=24, max_num_batched_tokens=8, num_blocks=400, num_speculative_tokens=4
    )
    for index in range(60):
        scheduler.add(kit.request(f"r{index}", 1 + index % 11, max_total=30))
    missed = {}
    for _ in range(4000):
        if not scheduler.has_unfinished:
            break
        plan, _ = kit.step(scheduler, accept=1)
        served = {row.slot for row in plan.requests}
        for name, state in list(scheduler._running.items()):
            missed[name] = 0 if state.slot in served else missed.get(name, 0) + 1
            assert state.prefilling or missed[name] <= 2 * 24 // 8 + 1, name
            if state.at_limit:
                scheduler.release(name)
    assert not scheduler.has_unfinished

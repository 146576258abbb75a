"""How many drafts a window may have: by load, acceptance, matches and time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.scheduler import padding
from sametoken.scheduler.draft_limits import (
    CROWD_WEIGHTS,
    PRIOR_RATE,
    DraftRecord,
    DraftWorth,
    StepReads,
    StepTime,
    Window,
    windows_of,
)
from sametoken.types.layout import StepLayout, StepShape

K = 8


def record_of(windows):
    """The record after windows of (drafts, proposed, accepted)."""
    record = DraftRecord()
    for window in windows:
        record = record.after(*window)
    return record


def limit(record, num_decoding, num_read_rows=200, most=K):
    """The limit in a step of decoding requests that are all alike."""
    windows = windows_of(dict.fromkeys(range(num_decoding), (record, most)))
    return limits(windows.values(), StepTime(num_read_rows))[0]


def limits(windows, time, beside=0):
    return list(DraftWorth(dict(enumerate(windows)), time).limits(beside).values())


def rates(*records):
    windows = windows_of({i: (record, K) for i, record in enumerate(records)})
    return [window.rate for window in windows.values()]


def test_before_any_result_the_prior_holds():
    assert rates(DraftRecord()) == [pytest.approx(PRIOR_RATE)]
    # Six are worth it beside single rows, 0.8 ** 6 is 0.26 and 64 of 264 is 0.24, and make
    # 253 tokens in the time of 648 rows, 0.39; 0.8 ** 4 is 0.41.
    assert limit(DraftRecord(), 64) == 4


def test_a_new_request_has_the_crowd_s_rate():
    for accepted in (1, 4, 8):
        crowd = [DraftRecord(accepted, 9)] * 100
        assert rates(*crowd, DraftRecord())[-1] == pytest.approx((accepted + 0.4) / 9.5, rel=0.01)


def test_what_chance_explains_is_no_difference_between_requests():
    """Four of ten drafts, and eight, happen to requests that all have a rate of 0.6."""
    alike = [DraftRecord(10 * rate, 10) for rate in (0.4, 0.5, 0.6, 0.7, 0.8)] * 10
    found = rates(*alike)
    assert max(found) - min(found) == pytest.approx(0.4 * 10 / (10 + CROWD_WEIGHTS[1]))
    unlike = [DraftRecord(10 * rate, 10) for rate in (0.1, 0.3, 0.6, 0.8, 0.9)] * 10
    found = rates(*unlike)
    assert max(found) - min(found) > 0.7 * 0.8
    # Requests whose counts have faded say nothing of the others.
    faded = [DraftRecord(0, 1e-9)] * 500
    assert rates(*unlike, *faded)[4] > 0.8
    # Of a few drafts each, the same rates say less.
    few = [one._replace(accepted=one.accepted / 5, verified=2.0) for one in unlike]
    assert max(rates(*few)) - min(rates(*few)) < 0.3


def test_the_crowd_s_weight_is_that_of_the_distribution_of_rates():
    """Rates of a beta distribution with this weight, each seen in enough drafts to be known."""
    draw = np.random.default_rng(0)
    for weight in (2.0, 8.0):
        own = draw.beta(0.6 * weight, 0.4 * weight, 10_000)
        found = rates(*(DraftRecord(1000 * rate, 1000) for rate in own), DraftRecord())
        # A rate lies between its own and the crowd's: each counts by its weight.
        shrunk = (own[0] - found[0]) / (found[0] - found[-1])
        assert 1000 * shrunk == pytest.approx(weight, rel=0.05)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=50),
)
def test_a_rate_lies_between_the_request_s_own_and_the_crowd_s(counts):
    records = [DraftRecord(min(pair), max(pair)) for pair in counts]
    new = rates(*records, DraftRecord())
    for record, rate in zip(records, new[:-1], strict=True):
        assert 0 < rate < 1
        own = record.accepted / record.verified if record.verified else new[-1]
        assert min(own, new[-1]) - 1e-9 <= rate <= max(own, new[-1]) + 1e-9
        if record.verified:
            shrunk = abs(rate - new[-1]) * (record.verified + CROWD_WEIGHTS[1])
            assert shrunk >= abs(own - new[-1]) * record.verified - 1e-6


def test_the_limit_is_the_most_drafts_that_are_likely_enough():
    for rate in (0.001, 0.3, 0.8, 0.99):
        window = Window(rate, K)
        for least in (0.01, 0.1, 0.24, 0.5, 0.9, 1.5):
            most = window.limit(least)
            assert most == 0 or window.chance(most) >= least
            assert most == K or window.chance(most + 1) < least


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=300),
    st.integers(0, 12),
    st.floats(1, 5000),
    st.sampled_from([(0, 0), (500, 1 / 8), (2000, 1 / 16), (9000, 1 / 32)]),
)
def test_no_other_limits_make_many_more_tokens_a_time(chances, most, reads, experts):
    """The best chance for all to ask for is found by trying all that change a limit."""
    windows = [Window(rate, most) for rate in chances]
    worth = DraftWorth(dict(enumerate(windows)), StepTime(reads, *experts))
    found = worth.limits(0)
    asked = {1} | {window.chance(n + 1) for window in windows for n in range(most)}
    best = max(
        worth.tokens_per_time({i: one.limit(chance) for i, one in enumerate(windows)})
        for chance in asked
    )
    assert worth.tokens_per_time(found) > (0.92 if experts[0] else 0.99) * best


def test_limits_of_measured_steps():
    """Qwen3-8B's shape on an H100: three drafts were faster than two, and than four.

    256 requests of 600 positions, and 64 of 3,000; rates of 0.8 and 0.6.
    """
    reads = StepReads(15.9e9, 15.9e9 / 250, kv_bytes=147_456)
    for rate, num_requests, length, k in ((0.8, 256, 600, 3), (0.6, 64, 3000, 5)):
        time = reads.time(num_requests, num_requests * length)
        assert limits([Window(rate, k)] * num_requests, time) == [3] * num_requests


def test_the_time_of_a_step_is_that_of_its_reads_of_experts_and_of_rows():
    time = StepTime(100, 64, 1 / 4)
    assert time.of(0) == 100
    assert time.of(1) == 100 + 16 + 1
    assert time.of(2, 3) == 100 + 16 + 12 + 2 + 3
    assert time.of_experts(1) == time.of(2) - time.of(1) - 1 == 12


def test_few_rows_that_choose_experts_of_their_own_have_drafts_that_are_likely():
    """GLM-4.7-Flash: 64 experts of which a row chooses four, and reads are mostly experts.

    On an H200 a step of one row takes 4.4 ms, of four 7.6, of eight 8.9 and of 32 16.0.
    """
    time = StepTime(120, 654, 1 / 16)
    assert time.of(4) / time.of(1) == pytest.approx(7.6 / 4.4, rel=0.05)
    assert time.of(32) / time.of(8) == pytest.approx(16.0 / 8.9, rel=0.05)
    assert [limits([Window(rate, 3)], time)[0] for rate in (0.2, 0.4, 0.8)] == [0, 1, 3]
    assert [limits([Window(rate, 3)] * 8, time)[0] for rate in (0.4, 0.8)] == [0, 3]
    # Many drafts are worth what few are not: they share the experts that they choose.
    assert limits([Window(0.8, 12)] * 4, time)[0] == 12
    # Many rows read all experts whatever a draft chooses, and so do those of a prompt.
    assert limits([Window(0.4, 3)] * 64, time)[0] == 2
    assert limits([Window(0.4, 3)] * 8, time, beside=64)[0] == 3


def test_a_drafter_that_is_right_keeps_k_under_load():
    record = record_of([(K, K, K)] * 10)
    assert [limit(record, n) for n in (1, 64, 256)] == [K, K, K]
    assert limit(record_of([(64, 64, 64)] * 10), 64, most=64) == 64


def test_a_drafter_that_is_wrong_has_no_drafts_under_load_and_some_alone():
    record = record_of([(K, K, 0)] * 10)
    assert limit(record, 64) == 0
    assert limit(record, 2) == 1


def test_more_load_means_fewer_drafts_and_a_device_that_computes_more_rows_has_more():
    record = record_of([(K, K, 3)] * 10)
    by_load = [limit(record, n) for n in (2, 8, 32, 128, 512)]
    assert by_load == sorted(by_load, reverse=True)
    assert by_load[0] == K
    assert by_load[-1] < 2
    by_device = [limit(record, 32, rows) for rows in (1, 32, 200, 2000)]
    assert by_device == sorted(by_device)
    assert by_device[0] < by_device[-1]


def test_without_a_match_there_are_no_drafts():
    good = record_of([(K, K, K)] * 10)
    without = good.after(0, 0, 0)
    assert limit(good, 64) == K
    assert limit(without, 64) == 0
    # What is proposed counts, one draft or more, offered or not.
    assert limit(without.after(0, 1, 0), 64) == K


def test_small_steps_are_free(kit):
    hopeless, reads = record_of([(3, 3, 0)] * 20 + [(0, 0, 0)]), StepReads(32, free_rows=16)
    assert planned(kit, [hopeless] * 4, reads=reads) == [3] * 4
    assert planned(kit, [hopeless] * 5, reads=reads) == [0] * 5
    assert planned(kit, [hopeless]) == [0]


def test_rows_that_choose_experts_are_not_free_in_small_steps(kit):
    reads = StepReads(100, experts_bytes=2000, experts_share=0.25)
    scheduler = crowd(kit, 2, num_speculative_tokens=3, reads=reads)
    assert limits_of(scheduler.plan()) == {3}
    for state, record in zip(scheduler._running.values(), (BAD, GOOD), strict=True):
        state.drafts = record
    assert [row.draft_limit for row in scheduler.plan().requests] == [0, 3]


#: SmolLM2-135M and its EAGLE-3 head on a CPU, one request: in 4 bits, and in bf16.
FOUR_BITS, BF16 = StepTime(10.9, draft=1.7, catch_up=1), StepTime(23.7, draft=1.7, catch_up=0.9)


def wanted(rates, time, k=4):
    return DraftWorth(dict(enumerate(Window(rate, k) for rate in rates)), time).num_wanted()


def test_a_drafter_makes_the_drafts_that_are_worth_its_passes():
    assert [wanted([rate], FOUR_BITS) for rate in (0.01, 0.3, 0.5, 0.75, 0.95)] == [0, 1, 1, 3, 4]
    assert [wanted([rate], BF16) for rate in (0.01, 0.3, 0.5, 0.75, 0.95)] == [0, 1, 2, 4, 4]
    # One pass for all requests: those that are often right pay for it.
    assert wanted([0.8] + [0.01] * 3, FOUR_BITS) < wanted([0.8] * 4, FOUR_BITS) == 2
    # A large crowd has no row to spare, whatever a pass takes.
    assert wanted([0.5] * 64, FOUR_BITS) == 0
    assert wanted([0.5] * 64, replace(FOUR_BITS, reads=1000)) > 0
    # Some have no drafts at all.
    assert DraftWorth({0: Window(0.9, 0)}, BF16).num_wanted() == 0


@given(
    st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 6)), min_size=1, max_size=6),
    st.floats(1, 64),
    st.floats(0, 8),
)
def test_no_other_number_of_passes_makes_more_tokens_by_the_time(windows, reads, draft):
    time = StepTime(reads, draft=draft, catch_up=draft / 2)
    worth = DraftWorth(dict(enumerate(Window(*one) for one in windows)), time)
    limits, best = worth.limits(0), worth.num_wanted()

    def rate(most):
        drafts = [min(limit, most) for limit in limits.values()]
        pairs = zip(windows, drafts, strict=True)
        tokens = sum(rate * (1 - rate**n) / (1 - rate) for (rate, _), n in pairs)
        passes = draft / 2 if most == 0 else draft * most
        return (len(windows) + tokens) / (reads + len(windows) + sum(drafts) + passes)

    assert rate(best) == pytest.approx(max(map(rate, range(7))))


PASSES = StepReads(10.9, dead_rows=False, draft_share=0.146, catch_up_share=0.081)


def test_plans_say_how_many_drafts_are_wanted(kit):
    """Those of prompts that end too, of which nothing is known yet."""
    options = {"num_speculative_tokens": 4, "adaptive_drafts": True, "reads": PASSES}
    for accept, expected in ((4, 4), (0, 0)):
        scheduler = kit.scheduler(longest_chunk=4, **options)
        scheduler.add(kit.request("a", 6, max_total=60))
        # Nobody has a next window.
        assert kit.step(scheduler)[0].num_wanted is None
        plan, _ = kit.step(scheduler, proposed=0)
        assert plan.num_wanted == wanted([PRIOR_RATE], FOUR_BITS) == 4
        plans = [kit.step(scheduler, accept=accept)[0] for _ in range(9)]
        assert plans[-1].num_wanted == expected


@pytest.mark.parametrize(
    "options",
    [
        {"adaptive_drafts": False},
        {"reads": StepReads(10.9)},
        {"reads": replace(PASSES, free_rows=16)},
        {"num_speculative_tokens": 0},
    ],
)
def test_all_passes_run_where_limits_are_fixed_or_passes_free(kit, options):
    sizes = {"num_speculative_tokens": 4, "adaptive_drafts": True, "reads": PASSES}
    scheduler = kit.scheduler(**sizes | options)
    scheduler.add(kit.request("a", 3, max_total=60))
    plans = [kit.step(scheduler)[0] for _ in range(20)]
    assert {plan.num_wanted or None for plan in plans} == {None}


def test_a_request_whose_drafts_were_not_wanted_has_some_again(kit):
    """No proposal because none was wanted tells nothing of a drafter."""
    scheduler = kit.scheduler(
        num_speculative_tokens=4, adaptive_drafts=True, reads=PASSES, max_model_len=2000,
        num_blocks=600,
    )  # fmt: skip
    scheduler.add(kit.request("a", 3, max_total=1900))
    made, counts = 0, []
    for _ in range(300):
        plan, _ = kit.step(scheduler, accept=0, proposed=made)
        (row,) = plan.requests
        assert row.draft_limit >= min(made, 1), "one that is made is verified"
        made = plan.num_wanted
        counts.append(made)
    assert counts.index(0) < 20
    assert 5 < sum(counts[100:]) < 50
    for _ in range(60):
        plan, _ = kit.step(scheduler, accept=made, proposed=made)
        made = plan.num_wanted
    assert made == 4


def test_a_match_is_used_at_once_where_drafts_that_are_missing_take_no_rows(kit):
    for dead_rows, expected in ((True, 0), (False, K)):
        scheduler = crowd(kit, 2, reads=StepReads(200, dead_rows=dead_rows))
        for _ in range(3):
            plan, _ = kit.step(scheduler, proposed=0)
        assert limits_of(plan) == {expected}


def test_evidence_fades_and_a_refused_request_is_tried_again():
    record = record_of([(K, K, 0)] * 20)
    waited = 0
    while not limit(record, 64):
        record = record.after(0, K, 0)
        waited += 1
    assert 20 < waited < 60
    # One more failure, and it waits again, less long: the load says how often it may try.
    record = record.after(1, K, 0)
    assert limit(record, 64) == 0
    for _ in range(200):
        record = record.after(0, K, 0)
    assert rates(record) == [pytest.approx(PRIOR_RATE, abs=0.001)]


def test_a_request_that_turns_good_is_believed_within_a_few_windows():
    record = record_of([(K, K, 0)] * 20 + [(0, K, 0)] * 60)
    found = []
    for _ in range(10):
        found.append(limit(record, 64))
        record = record.after(found[-1], K, found[-1])
    assert found == sorted(found)
    assert found[-1] == K


def test_a_row_s_worth_grows_with_what_a_step_reads():
    """Here a position's KV is a hundredth of the weights, and a state a tenth."""
    reads = StepReads(1000, 5, kv_bytes=10, state_bytes=100)
    assert reads.time(50, 0) == StepTime(200 * 6)
    assert reads.time(50, 300) == StepTime(200 * 9)
    assert StepReads(1000, 5, 10).time(50, 300) == StepTime(200 * 4)
    assert StepReads(200).time(50, 300) == StepTime(200)
    sparse = StepReads(1000, 5, experts_bytes=3000, experts_share=0.25)
    assert sparse.time(50, 300) == StepTime(200, 600, 0.25)


def test_requests_of_long_contexts_have_more_drafts(kit):
    fair = record_of([(K, K, 3)] * 10)
    reads = StepReads(256, 8, kv_bytes=1)
    found = []
    for prompt_len in (3, 40):
        sizes = {"max_model_len": 128, "reads": reads, "num_blocks": 1024}
        scheduler = crowd(kit, 32, prompt_len, max_num_batched_tokens=2048, **sizes)
        for state in scheduler._running.values():
            state.drafts = fair
        found.append(limits_of(scheduler.plan()))
        assert found[-1] == {limit(fair, 32, reads.time(32, 32 * (prompt_len + 1)).reads)}
    assert max(found[0]) < min(found[1]) < K


def test_fixed_limits_are_k_whatever_happens(kit):
    hopeless = record_of([(3, 3, 0)] * 9 + [(0, 0, 0)])
    assert planned(kit, [hopeless] * 40, adaptive=False) == [3] * 40


def test_plain_decoding_has_none(kit):
    for count in (1, 17, 40):
        scheduler = crowd(kit, count, num_speculative_tokens=0)
        assert limits_of(scheduler.plan()) == {0}


def crowd(kit, count, prompt_len=3, **overrides):
    sizes = {"max_num_seqs": count, "max_num_batched_tokens": 9 * count, "num_blocks": 16 * count}
    scheduler = kit.scheduler(
        **sizes | {"adaptive_drafts": True, "num_speculative_tokens": K} | overrides
    )
    for index in range(count):
        scheduler.add(kit.request(f"r{index}", prompt_len, max_total=60))
    kit.step(scheduler, proposed=0)
    return scheduler


def limits_of(plan):
    return {row.draft_limit for row in plan.requests}


def test_of_64_requests_without_matches_none_has_rows_for_drafts_until_one_matches(kit):
    scheduler = crowd(kit, 64, reads=StepReads(200))
    # Right after the prompts nothing is known, and each may have what the prior says.
    assert limits_of(kit.step(scheduler, proposed=0)[0]) == {4}
    for _ in range(5):
        assert limits_of(kit.step(scheduler, proposed=0)[0]) == {0}
    # The device says that there are matches again, though none was offered.
    assert limits_of(kit.step(scheduler, proposed=4)[0]) == {0}
    assert limits_of(kit.step(scheduler, accept=4, proposed=4)[0]) == {4}
    assert limits_of(kit.step(scheduler, accept=4, proposed=4)[0]) == {K}


def test_matches_are_seen_as_late_as_results_come(kit):
    scheduler = crowd(kit, 64, reads=StepReads(200))
    for _ in range(3):
        kit.step(scheduler, proposed=0)
    plans = [scheduler.plan() for _ in range(2)]
    scheduler.process_output(kit.result(plans.pop(0), proposed=5))
    plans.append(scheduler.plan())
    assert [limits_of(plan) for plan in plans] == [{0}, {4}]


def test_the_end_of_a_prompt_says_nothing_of_drafts(kit):
    scheduler = kit.scheduler(
        max_num_seqs=8, num_blocks=99, num_speculative_tokens=4, adaptive_drafts=True
    )
    kit.add(scheduler, "abcdefgh", 3, max_total=60)
    kit.step(scheduler, proposed=0)
    assert 0 not in limits_of(scheduler.plan())


def test_good_and_bad_requests_of_one_step_have_limits_of_their_own(kit):
    scheduler = crowd(kit, 16, reads=StepReads(32))
    for _ in range(4):
        plan = scheduler.plan()
        results = [kit.result(plan, accept=a).requests for a in (0, K)]
        rows = tuple(results[row.slot % 2][i] for i, row in enumerate(plan.requests))
        scheduler.process_output(type(kit.result(plan))(plan.step_id, rows))
    plan = scheduler.plan()
    assert {row.draft_limit for row in plan.requests if row.slot % 2} == {K}
    # Now and then one more try.
    assert max(row.draft_limit for row in plan.requests if not row.slot % 2) <= 1


READS = StepReads(32)
BAD, FAIR, GOOD = DraftRecord(0, 99), DraftRecord(22, 99), DraftRecord(99, 99)


def captured(windows, num_rows, longest=4):
    """A captured step that only decodes."""
    return StepShape(windows, num_rows, num_rows, windows, longest, longest)


def planned(kit, records, *shapes, adaptive=True, reads=READS):
    """The draft limits of requests with these records, where these shapes are captured."""
    scheduler = crowd(
        kit,
        len(records),
        num_speculative_tokens=3,
        reads=reads,
        adaptive_drafts=adaptive,
        captured_shapes=shapes,
    )
    for state, record in zip(scheduler._running.values(), records, strict=True):
        state.drafts = record
    return [row.draft_limit for row in scheduler.plan().requests]


def test_the_likeliest_drafts_take_the_place_of_a_captured_step_s_padding(kit):
    records = [GOOD] * 4 + [BAD] * 8 + [FAIR] * 4
    wanted = [3] * 4 + [0] * 12
    assert planned(kit, records) == wanted
    assert planned(kit, records, captured(16, 28)) == wanted
    assert planned(kit, records, captured(16, 31)) == [3] * 4 + [0] * 8 + [1] * 3 + [0]
    assert planned(kit, records, captured(16, 34)) == [3] * 4 + [1] * 2 + [0] * 6 + [1] * 4
    # Windows are no longer than those of the step.
    assert planned(kit, [FAIR] * 16, captured(16, 40, longest=1)) == [0] * 16
    assert planned(kit, [FAIR] * 16, captured(16, 40, longest=2)) == [1] * 16
    # The first that holds the step; each has one draft more at most, and none more than k.
    shapes = captured(15, 30), captured(16, 27), captured(16, 29), captured(16, 34)
    assert planned(kit, records, *shapes) == [3] * 4 + [0] * 8 + [1] + [0] * 3
    assert planned(kit, records, captured(64, 256)) == [3] * 4 + [1] * 12
    assert planned(kit, records, captured(64, 256, longest=9)) == [3] * 4 + [1] * 12
    # Logits of fewer rows than there are.
    assert sum(planned(kit, records, replace(captured(16, 34), num_sampled=30))) == 14


def test_drafts_that_are_not_worth_a_larger_captured_step_are_left_out(kit):
    """48 rows more are worth 16 tokens: 16 of 48 rows are decoding requests."""
    silent = FAIR._replace(proposes=False)
    shapes = captured(16, 16, longest=1), captured(16, 64)
    for good, others in ((5, 0), (6, 3)):
        found = planned(kit, [GOOD] * good + [silent] * (16 - good), *shapes)
        assert found == [others] * good + [0] * (16 - good)
    # Other requests' drafts in place of padding count, here 2.8.
    assert planned(kit, [GOOD] * 5 + [FAIR] * 11, *shapes) == [3] * 5 + [1] * 11
    # Windows of one row have no captured step of their own.
    assert planned(kit, [GOOD] + [silent] * 15, shapes[1]) == [3] + [0] * 15


def test_padding_brings_no_draft_to_steps_without(kit):
    silent = FAIR._replace(proposes=False)
    shapes = captured(16, 16, longest=1), captured(16, 64)
    assert planned(kit, [BAD] * 16, *shapes) == [0] * 16
    assert planned(kit, [GOOD] * 8 + [silent] * 8, *shapes) == [3] * 8 + [0] * 8
    # No captured step holds this one.
    assert planned(kit, [GOOD] + [FAIR] * 15, captured(16, 18)) == [3] + [0] * 15
    assert planned(kit, [FAIR] * 16, captured(16, 64), adaptive=False) == [3] * 16


def test_the_sizes_of_turns_are_those_of_their_plan_s_layout(kit, monkeypatch):
    of, found = padding.shape_of, []
    monkeypatch.setattr(padding, "shape_of", lambda turns: found.append(of(turns)) or found[-1])
    scheduler = kit.scheduler(
        max_num_seqs=8, max_num_batched_tokens=24, longest_chunk=9, num_blocks=99,
        num_speculative_tokens=16, adaptive_drafts=True, captured_shapes=(captured(0, 0),),
    )  # fmt: skip
    shapes = []
    for length in (1, 3, 30, 5, 1, 12, 0, 0, 0):
        if length:
            scheduler.add(kit.request(f"r{length}{len(shapes)}", length, max_total=length + 6))
        plan, _ = kit.step(scheduler, accept=1)
        shapes.append(StepLayout.of(plan).shape)
    # Nobody decodes in the first.
    assert found == shapes[1:]
    assert {shape.num_chunks for shape in found} >= {0, 1}


def test_fixed_limits_stay_under_load(kit):
    scheduler = crowd(kit, 64, adaptive_drafts=False)
    for _ in range(6):
        assert limits_of(kit.step(scheduler, proposed=0)[0]) == {K}

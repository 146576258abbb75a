import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.types.outputs import CompletionOutput, SpeculationMetrics

counted = SpeculationMetrics.of
STEPS = st.lists(
    st.integers(0, 5).flatmap(lambda drafts: st.tuples(st.just(drafts), st.integers(0, drafts)))
)


def test_a_completion_is_shown_without_its_windows():
    shown = repr(CompletionOutput(0, "a", (5,), windows=((0, 0),) * 99))
    assert "text='a'" in shown
    assert "windows" not in shown


def test_nothing_counted_divides_by_nothing():
    metrics = SpeculationMetrics()
    assert metrics.acceptance_length == 0.0
    assert metrics.acceptance_rate == 0.0
    assert metrics.acceptance_per_position == ()


def test_plain_decoding_emits_one_token_a_step():
    metrics = counted([(0, 0), (0, 0)])
    assert metrics.num_steps == 2
    assert metrics.acceptance_length == 1.0
    assert metrics.acceptance_rate == 0.0


def test_the_bonus_token_counts_in_the_length_and_not_in_the_rate():
    metrics = counted([(4, 4), (4, 1), (2, 0)])
    assert metrics.num_draft_tokens == 10
    assert metrics.num_accepted_tokens == 5
    assert metrics.acceptance_length == pytest.approx(1 + 5 / 3)
    assert metrics.acceptance_rate == 0.5


def test_positions_are_counted_from_the_first_draft():
    metrics = counted([(1, 1), (3, 2), (0, 0), (3, 0)])
    assert metrics.offered_per_position == (3, 2, 2)
    assert metrics.accepted_per_position == (2, 1, 0)
    assert metrics.acceptance_per_position == pytest.approx((2 / 3, 0.5, 0.0))


@given(STEPS)
def test_positions_add_up_to_the_totals(steps):
    metrics = counted(steps)
    assert sum(metrics.offered_per_position) == metrics.num_draft_tokens
    assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens
    assert len(metrics.offered_per_position) == max((d for d, _ in steps), default=0)


@given(STEPS, STEPS)
def test_the_sum_of_two_runs_is_the_run_of_both(one, other):
    assert counted(one) + counted(other) == counted(one + other)
    assert counted(one) + SpeculationMetrics() == counted(one)

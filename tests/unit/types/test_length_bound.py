from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.errors import InFlightError, InvariantError
from sametoken.types.length_bound import LenBound


def test_a_known_length_is_exact():
    assert LenBound.known(5).exact == 5
    assert LenBound.known(0) == LenBound(0, 0)


def test_an_unsettled_length_cannot_be_used_as_an_index():
    """vllm#38419: the host read the token to go on from at its optimistic length."""
    bound = LenBound.known(5).after_launch(draft_limit=3)
    with pytest.raises(InFlightError, match=r"\[6, 9\]"):
        _ = bound.exact


@pytest.mark.parametrize(("limit", "accepted"), [(4, 0), (4, 3), (5, 4)])
def test_a_result_belongs_to_a_step_that_was_launched(limit, accepted):
    bound = LenBound.known(5).after_launch(3)
    with pytest.raises(InvariantError, match="is not an interval"):
        bound.after_result(limit, accepted)


def test_launch_and_result_move_the_ends():
    bound = LenBound.known(10).after_launch(4)
    assert bound == LenBound(11, 15)
    assert bound.after_result(4, 0) == LenBound.known(11)
    assert bound.after_result(4, 3) == LenBound.known(14)
    assert bound.after_result(4, 4) == LenBound.known(15)


def test_a_step_without_drafts_keeps_a_length_exact():
    assert LenBound.known(10).after_launch(0).exact == 11


STEPS = st.lists(
    st.integers(0, 8).flatmap(lambda limit: st.tuples(st.just(limit), st.integers(0, limit)))
)


@given(STEPS, st.integers(1, 3))
def test_the_interval_holds_the_truth_and_closes(steps, depth):
    """Several steps in flight, processed in order: lo <= device length <= hi at all times."""
    bound, device, in_flight = LenBound.known(7), 7, deque()

    def process():
        return bound.after_result(*in_flight.popleft())

    for limit, accepted in steps:
        if len(in_flight) == depth:
            bound = process()
        bound = bound.after_launch(limit)
        device += accepted + 1
        in_flight.append((limit, accepted))
        assert bound.lo <= device <= bound.hi
    while in_flight:
        bound = process()
        assert bound.lo <= device <= bound.hi
    assert bound.exact == device


def test_more_accepted_than_offered_is_refused():
    with pytest.raises(InvariantError, match="2 of at most 1 drafts"):
        LenBound.known(10).after_launch(1).after_result(1, 2)

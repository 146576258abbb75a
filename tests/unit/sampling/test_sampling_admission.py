import pytest

from sametoken.errors import RequestError
from sametoken.sampling.admission import require_choosable
from sametoken.types.sampling_params import SamplingParams

REFUSED = [
    ({"allowed_token_ids": [1, 10]}, (), (), "allowed_token_ids names token id 10"),
    ({"logit_bias": {-1: 1.0}}, (), (), "logit_bias names token id -1"),
    ({}, (), ((1, 10),), "bad_words names token id 10"),
    ({}, (), ((),), "no tokens"),
    ({"allowed_token_ids": [2]}, (), ((2,),), "forbid every token"),
    ({"allowed_token_ids": [2, 3], "min_tokens": 1}, (3,), ((2,),), "forbid every token"),
    ({}, (), tuple((i,) for i in range(10)), "forbid every token"),
]
ADMITTED = [
    ({}, (), ()),
    ({"allowed_token_ids": [2]}, (2,), ()),
    ({"allowed_token_ids": [2]}, (), ((2, 2),)),
    ({"min_tokens": 2}, (99,), ()),
    ({"allowed_token_ids": [2, 3], "min_tokens": 1}, (3,), ()),
]


@pytest.mark.parametrize(("options", "stop_ids", "bad_words", "cause"), REFUSED)
def test_impossible_masks_are_refused_by_name(options, stop_ids, bad_words, cause):
    with pytest.raises(RequestError, match=cause):
        require_choosable(SamplingParams(**options), 10, stop_ids, bad_words)


@pytest.mark.parametrize(("options", "stop_ids", "bad_words"), ADMITTED)
def test_possible_masks_are_admitted(options, stop_ids, bad_words):
    require_choosable(SamplingParams(**options), 10, stop_ids, bad_words)

"""Options of suffix decoding and cascades, as a speculative config takes them."""

from __future__ import annotations

import pytest

from sametoken.config import SpeculativeConfig
from sametoken.errors import ConfigError


def test_suffix_drafts_as_far_as_it_matches_unless_told_otherwise():
    assert SpeculativeConfig.parse({"method": "suffix"}).num_speculative_tokens == 24
    deep = {"method": "suffix", "suffix_decoding_max_tree_depth": 32}
    assert SpeculativeConfig.parse(deep).num_speculative_tokens == 32
    assert SpeculativeConfig.parse(deep | {"num_speculative_tokens": 7}).num_speculative_tokens == 7


def test_a_cascade_may_draft_more_than_its_model():
    spec = SpeculativeConfig.parse(
        {
            "method": "mtp",
            "num_speculative_tokens": 20,
            "cascade": "suffix",
            "cascade_model_tokens": 3,
        }
    )
    assert (spec.num_speculative_tokens, spec.num_model_tokens) == (20, 3)
    same = SpeculativeConfig("mtp", 3, cascade="ngram")
    assert (same.num_speculative_tokens, same.num_model_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"suffix_decoding_max_tree_depth": 0}, "max_tree_depth=0"),
        ({"suffix_decoding_max_cached_requests": -1}, "max_cached_requests=-1"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "max_spec_factor=-0.5"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob=1.5"),
        ({"cascade_model_tokens": 2}, "without a cascade"),
        ({"cascade": "mtp"}, "cascade 'mtp' with method 'draft_model'"),
        ({"cascade": "ngram", "method": "suffix", "model": None}, "with method 'suffix'"),
        ({"cascade": "ngram", "cascade_min_match": 0}, "cascade_min_match=0"),
        ({"cascade": "suffix", "cascade_min_match": 25}, "cascade_min_match=25"),
        ({"cascade": "ngram", "cascade_model_tokens": 5}, "cascade_model_tokens=5"),
        ({"cascade": "ngram", "cascade_model_tokens": 0}, "num_speculative_tokens=0"),
        ({"cascade": "ngram", "num_speculative_tokens": 65, "cascade_model_tokens": 2}, "=65"),
        ({"cascade": 3}, "cascade=3 is of the wrong type"),
        ({"suffix_decoding_min_token_prob": "a"}, "wrong type"),
    ],
)
def test_what_means_nothing_is_refused(changes, cause):
    plain = {"method": "draft_model", "model": "m", "num_speculative_tokens": 4}
    given = {key: value for key, value in (plain | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=cause) as caught:
        SpeculativeConfig.parse(given)
    assert caught.value.remedy

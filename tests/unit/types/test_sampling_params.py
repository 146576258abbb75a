"""Sampling parameters: normal forms, and one rule of validation per line."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import math
import pickle

import numpy as np
import pytest

from sametoken.errors import RequestError
from sametoken.types.sampling_params import (
    MAX_LOGPROBS,
    MAX_SEED,
    SamplingParams,
    derive_seed,
    replica_seed,
)
from sametoken.types.structured_outputs import StructuredOutputs

NAN, INF = math.nan, math.inf


def test_sequences_become_tuples():
    params = SamplingParams(
        stop=["a", "b"], stop_token_ids=[1], bad_words=["c"], allowed_token_ids=[2, 3]
    )
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (1,)
    assert params.bad_words == ("c",)
    assert params.allowed_token_ids == (2, 3)
    assert SamplingParams(stop="end").stop == ("end",)


def test_none_is_nothing():
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.allowed_token_ids is None
    assert params == SamplingParams()


def test_numbers_of_numpy_become_python_s():
    params = SamplingParams(
        seed=np.int64(7),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(3): np.float32(2.0)},
    )
    assert params == SamplingParams(
        seed=7, temperature=0.5, stop_token_ids=[1, 2], logit_bias={3: 2.0}
    )
    assert (type(params.seed), type(params.temperature)) == (int, float)
    assert {type(one) for one in params.stop_token_ids} == {int}
    with pytest.raises(RequestError, match=r"an integer of at least 1$"):
        SamplingParams(max_tokens=np.int64(0))


def test_top_k_of_minus_one_keeps_all():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.1).greedy


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_counts_as_one(name):
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{name: 1.5}).has_penalties


def test_they_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1


EDGES = {
    "n": (1, 100),
    "temperature": (0, 100.0),
    "top_p": (1e-6, 1),
    "top_k": (-1, 0, 1, 2**31 - 1),
    "min_p": (0, 1),
    "seed": (None, 0, MAX_SEED),
    "max_tokens": (None, 1, 10**9),
    "min_tokens": (0, 16),
    "num_speculative_tokens": (None, 0, 64),
    "thinking_token_budget": (None, 0, 10**9),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-8, 100),
    "logprobs": (None, 0, MAX_LOGPROBS),
    "prompt_logprobs": (None, 0, MAX_LOGPROBS),
    "logit_bias": (None, {}, {5: -100.0}),
    "detokenize": (False,),
}
BEYOND = {
    "n": (0, -1, 1.0, True),
    "temperature": (-0.1, 100.1, NAN, INF, "1", True),
    "top_p": (0, -0.1, 1.1, NAN),
    "top_k": (-2, 1.5, True, 2**31),
    "min_p": (-0.1, 1.1, NAN),
    "seed": (-MAX_SEED - 2, MAX_SEED + 1, 1.5, True),
    "max_tokens": (0, -1, 1.5, True),
    "min_tokens": (-1, 1.5, True, 2**31),
    "presence_penalty": (-2.1, 2.1, NAN),
    "frequency_penalty": (-2.1, 2.1, INF),
    "repetition_penalty": (0, 1e-9, -1, 100.1, NAN),
    "num_speculative_tokens": (-1, 1.5, True),
    "thinking_token_budget": (-2, 1.5, True, "9"),
    "logprobs": (-1, MAX_LOGPROBS + 1, 1.5, True),
    "prompt_logprobs": (-1, MAX_LOGPROBS + 1, True),
    "logit_bias": ({"5": 1.0}, {5: NAN}, {5: INF}, {5: "1"}, {True: 1.0}),
    "stop": ([""], ["a", ""], [3]),
    "bad_words": ([""], ["a", ""], [3]),
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in EDGES.items() for v in vs])
def test_the_edges_of_each_range_are_possible(name, value):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in BEYOND.items() for v in vs])
def test_values_beyond_are_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"^{name}=.* is not possible") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.remedy.startswith(("use", "map"))


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(SamplingParams)])
def test_every_field_is_checked(field):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: object()})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("name", "item", "most"),
    [
        ("stop", "a", 128),
        ("bad_words", "a", 1024),
        ("stop_token_ids", 1, 1024),
    ],
)
def test_lists_have_their_most_entries(name, item, most):
    assert len(getattr(SamplingParams(**{name: [item] * most}), name)) == most
    for given in ([item] * (most + 1), itertools.repeat(item)):
        with pytest.raises(RequestError, match=f"^{name} has more than {most} entries") as caught:
            SamplingParams(**{name: given})
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("params", "cause", "remedy"),
    [
        ({"min_tokens": 17}, "min_tokens 17 is above max_tokens 16", "raise max_tokens"),
        ({"stop": "a", "detokenize": False}, "stop strings need text", "drop one of them"),
        ({"allowed_token_ids": []}, "no token is allowed", "name some"),
    ],
)
def test_contradictions_are_refused(params, cause, remedy):
    with pytest.raises(RequestError, match=cause) as caught:
        SamplingParams(**params)
    assert remedy in caught.value.remedy


def test_min_tokens_has_no_limit_without_max_tokens():
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000


@pytest.mark.parametrize(
    ("given", "seed"), [(-1, None), (-2, MAX_SEED - 1), (-MAX_SEED - 1, 0), (-MAX_SEED, 1)]
)
def test_negative_seeds_are_seeds_too(given, seed):
    """As in OpenAI's API; vLLM draws one for -1."""
    assert SamplingParams(seed=given).seed == seed


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("logprobs", 21, "from 0 to 20"),
        ("seed", 2**63, "integer from -9223372036854775808 to 9223372036854775807"),
        ("max_tokens", 0, "integer of at least 1"),
    ],
)
def test_an_error_tells_what_is_possible(name, value, told):
    with pytest.raises(RequestError, match=f"{told}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 - 1])
def test_the_first_completion_keeps_the_seed(seed):
    assert derive_seed(seed, 0) == seed


def test_derived_seeds_are_distinct_in_range_and_fixed():
    derived = [derive_seed(seed, index) for seed in range(100) for index in range(1, 20)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**63 for seed in derived)
    assert derive_seed(1, 11) != derive_seed(11, 1)


def test_replicas_share_no_seed_of_a_request_or_completion():
    """Those of two runs with neighbouring seeds neither."""
    engines = [replica_seed(seed, rank) for seed in (7, 8) for rank in range(3)]
    drawn = [derive_seed(engine, number) for engine in engines for number in range(1, 4)]
    completions = [derive_seed(seed, index) for seed in drawn for index in range(3)]
    assert len(set(completions)) == len(completions)
    assert engines[::3] == [7, 8]


def test_a_derived_seed_never_changes_between_releases():
    assert derive_seed(42, 1) == 6478890928803595225


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"max_new_tokens": 8}, "Use max_tokens"),
        ({"guided_decoding": None}, "Use structured_outputs"),
        ({"temprature": 0}, "Did you mean 'temperature'"),
    ],
)
def test_another_engines_argument_is_refused_with_what_to_use(given, remedy):
    with pytest.raises(RequestError, match=f"SamplingParams has no .*{remedy}") as caught:
        SamplingParams(**given)
    assert caught.value.param == next(iter(given))


@pytest.mark.parametrize("kind", [SamplingParams, StructuredOutputs])
def test_tools_see_every_argument(kind):
    assert list(inspect.signature(kind).parameters) == list(kind.__slots__)


def test_parameters_can_be_copied_and_pickled():
    params = SamplingParams(seed=1, structured_outputs=StructuredOutputs(regex="a"))
    assert copy.copy(params) == pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=2).seed == 2

"""One constraint on a text, and no other."""

from __future__ import annotations

from functools import reduce

import pytest

from sametoken.errors import RequestError
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import Reasoning, StructuredOutputs

DEEP = reduce(lambda inner, _: {"not": inner}, range(100_000), {"type": "null"})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json_schema": "{}"}, "json_schema"),
        ({"json_object": True}, "json_object"),
        ({"regex": "a+"}, "regex"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"choice": ("a", "b")}, "choice"),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag"),
    ],
)
def test_the_field_that_is_set_is_the_kind(fields, kind):
    assert StructuredOutputs(**fields).kind == kind


def test_a_schema_may_be_a_dict():
    form = StructuredOutputs(json_schema={"type": "integer"})
    assert form == StructuredOutputs(json_schema='{"type": "integer"}')


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, "sets nothing"),
        ({"json_object": False}, "sets nothing"),
        ({"regex": "a", "json_object": True}, "sets json_object and regex"),
        ({"regex": ""}, "regex=''"),
        ({"json_schema": ["a"]}, "json_schema="),
        ({"json_schema": {"a": object}}, "json_schema is not JSON"),
        ({"structural_tag": {"a": object}}, "structural_tag is not JSON"),
        ({"json_schema": DEEP}, "json_schema nests too deeply"),
        ({"json_object": 1}, "json_object=1"),
        ({"choice": ()}, "choice="),
        ({"choice": ("a", "")}, "choice="),
        ({"choice": "ab"}, "choice='ab'"),
        ({"choice": ("a", "\ud800")}, "choice=.* holds a lone surrogate"),
        ({"regex": "a\ud800"}, "regex=.* holds a lone surrogate"),
        ({"regex": "a", "free_after": ""}, "free_after=''"),
        ({"regex": "a", "free_after": 5}, "free_after=5"),
        ({"free_after": "a"}, "sets nothing"),
    ],
)
def test_anything_else_is_refused_with_a_remedy(fields, cause):
    with pytest.raises(RequestError, match=cause) as caught:
        StructuredOutputs(**fields)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "fields",
    [
        {"end": ()},
        {"end": [5]},
        {"end": (5.0,)},
        {"end": (True,)},
        {"end": (5,), "header_end": "5"},
        {"end": (5,), "begins": [5]},
    ],
)
def test_reasoning_has_an_end_of_tokens(fields):
    with pytest.raises(RequestError, match="Reasoning"):
        Reasoning(**fields)


def test_reasoning_is_no_constraint_and_of_its_own_type():
    reasoning = Reasoning((5,), 6, (7,))
    assert reasoning.token_ids == (5, 6, 7)
    assert StructuredOutputs(regex="a", reasoning=reasoning).kind == "regex"
    with pytest.raises(RequestError, match="sets nothing"):
        StructuredOutputs(reasoning=reasoning)
    with pytest.raises(RequestError, match="reasoning="):
        StructuredOutputs(regex="a", reasoning=(5,))


def test_choices_may_come_as_a_list_and_the_whole_is_hashable():
    assert StructuredOutputs(choice=["a", "b"]) == StructuredOutputs(choice=("a", "b"))
    assert len({StructuredOutputs(choice=["a"]), StructuredOutputs(choice=("a",))}) == 1


def test_sampling_parameters_take_nothing_else():
    assert SamplingParams(structured_outputs=StructuredOutputs(regex="a")).structured_outputs
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})


@pytest.mark.parametrize(
    ("given", "remedy"),
    [({"json": "{}"}, "Use json_schema"), ({"jsn_schema": "{}"}, "Did you mean 'json_schema'")],
)
def test_another_engines_argument_is_refused_with_what_to_use(given, remedy):
    with pytest.raises(RequestError, match=f"StructuredOutputs has no .*{remedy}"):
        StructuredOutputs(**given)

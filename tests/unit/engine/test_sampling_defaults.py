"""Default sampling parameters, of programs and of servers."""

from __future__ import annotations

import json

import pytest

from sametoken.engine.sampling_defaults import default_sampling_params, server_defaults
from sametoken.errors import CheckpointError
from sametoken.types.sampling_params import SamplingParams


def test_recommended_values_take_the_place_of_the_usual_ones(tmp_path):
    values = {"temperature": 0.6, "top_p": None, "top_k": 20, "min_p": 0.15, "max_length": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(values | {"max_new_tokens": 99}))
    expected = SamplingParams(temperature=0.6, top_k=20, min_p=0.15, max_tokens=99)
    assert default_sampling_params(tmp_path) == expected


def test_another_file_or_none_may_be_chosen(tmp_path):
    for name, temperature in (("own", 0.6), ("other", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text(f'{{"temperature": {temperature}}}')
    own, other = tmp_path / "own", tmp_path / "other"
    assert default_sampling_params(own, "auto") == SamplingParams(temperature=0.6)
    assert default_sampling_params(own, str(other)) == SamplingParams(temperature=0.2)
    assert default_sampling_params(own, "vllm") == SamplingParams()


def test_without_the_file_the_usual_ones_hold(tmp_path):
    assert default_sampling_params(tmp_path) == SamplingParams()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSON"),
        ("[1]", "JSON object"),
        ('{"temperature": -1}', "temperature=-1"),
        ('{"max_new_tokens": 0}', "max_tokens=0"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, why):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{why}"):
        default_sampling_params(tmp_path)


def limits_of(model, source, *requested):
    defaults = server_defaults(model, source)
    return [defaults.max_tokens(wanted) for wanted in requested]


def test_max_new_tokens_is_a_server_s_default_and_that_of_a_named_directory_its_limit_too(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 5, "max_new_tokens": 40}')
    assert limits_of(tmp_path, "auto", None, 8, 100) == [40, 8, 100]
    assert limits_of(tmp_path, str(tmp_path), None, 8, 100) == [40, 8, 40]
    assert limits_of(tmp_path, "vllm", None, 8, 100) == [None, 8, 100]
    assert server_defaults(tmp_path).params == SamplingParams(top_k=5, max_tokens=40)


def test_without_max_new_tokens_a_server_s_answers_may_fill_the_context(tmp_path):
    for source in ("auto", str(tmp_path)):
        (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
        assert limits_of(tmp_path, source, None, 100) == [None, 100]
    assert server_defaults(tmp_path).params == SamplingParams(top_k=5, max_tokens=None)

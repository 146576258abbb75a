"""What a checkpoint recommends is taken as far as it says something."""

from __future__ import annotations

import json

import pytest

from sametoken.engine.input_processor import default_sampling_params
from sametoken.errors import CheckpointError
from sametoken.types.sampling_params import SamplingParams


def test_recommended_values_take_the_place_of_the_usual_ones(tmp_path):
    values = {"temperature": 0.6, "top_p": None, "top_k": 20, "max_length": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert default_sampling_params(tmp_path) == SamplingParams(temperature=0.6, top_k=20)


def test_without_the_file_the_usual_ones_hold(tmp_path):
    assert default_sampling_params(tmp_path) == SamplingParams()


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "JSON"), ("[1]", "JSON object"), ('{"temperature": -1}', "temperature=-1")],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, why):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{why}"):
        default_sampling_params(tmp_path)

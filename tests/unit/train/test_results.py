"""The layout that is written, read by our loader and by transformers' own config class."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from helpers.checkpoints import HIDDEN, VOCAB, head_tensors, write_llama
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.loader import read_config
from sametoken.train.results import HeadLayout, write_head


@pytest.fixture
def layout(tmp_path):
    config = read_config(write_llama(tmp_path / "target", rope_theta=50000.0))
    return HeadLayout(
        layer=config,
        draft_vocab_size=9,
        aux_layers=(1, 2, 4),
        norm_before_residual=True,
        num_speculative_tokens=4,
        verifier="target",
    )


def test_our_loader_reads_it(tmp_path, layout):
    write_head(tmp_path / "head", layout, head_tensors())
    head = Eagle3Checkpoint(tmp_path / "head")
    head.require_fit(layout.layer)
    assert head.aux_layers(4) == (1, 2, 4)
    assert head.config.draft_vocab_size == 9
    assert head.config.norm_before_residual
    assert head.config.layer.rope == layout.layer.rope
    assert head.config.layer.num_layers == 1


def test_transformers_makes_a_llama_of_the_layer(tmp_path, layout):
    """vLLM and speculators build their config from this object."""
    write_head(tmp_path, layout, head_tensors())
    config = json.loads((tmp_path / "config.json").read_text())
    layer = LlamaConfig(**config["transformer_layer_config"])
    assert (layer.hidden_size, layer.vocab_size, layer.num_hidden_layers) == (HIDDEN, VOCAB, 1)
    assert layer.rope_parameters["rope_theta"] == 50000.0
    (method,) = config["speculators_config"]["proposal_methods"]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 4)


def test_rotary_settings_without_a_name_are_refused(tmp_path, layout):
    rope = {"rope_type": "divided", "rope_theta": 1.0, "divisors": (1.0,)}
    with pytest.raises(UnsupportedError, match="divisors"):
        write_head(tmp_path, replace(layout, layer=replace(layout.layer, rope=rope)), {})


def test_a_place_that_cannot_be_written_is_named(tmp_path, layout):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_head(tmp_path / "file" / "head", layout, {"norm.weight": torch.ones(2)})

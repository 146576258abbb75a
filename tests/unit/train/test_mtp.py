"""A module for further tokens, trained on its target's own text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import write_checkpoint, write_llama
from helpers.hybrids import hybrid_config, hybrid_tensors, without_mtp
from helpers.nemotron import write_nemotron
from helpers.training import (
    LOOP,
    MISFITS,
    open_llm,
    require_accepted,
    require_mixed_precision,
    require_one_error_without_memory,
    require_own_settings,
    require_refused_early,
    write_own_text,
)
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.train.distillation import TrainingText
from sametoken.train.mtp import train_mtp
from sametoken.train.networks import DecoderNetwork
from sametoken.train.options import MTPOptions

K = 2
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
MODULE = MTPOptions(ttt_steps=K)
SPECULATION = {"method": "mtp", "draft_limits": "fixed", "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    config = hybrid_config("qwen3_5", **SIZES)
    tensors = without_mtp(hybrid_tensors(config, 2))
    return write_checkpoint(tmp_path_factory.mktemp("target"), config, tensors)


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    """With a module, which the trained one takes the place of."""
    return write_nemotron(tmp_path_factory.mktemp("nemotron"), 2, vocab_size=61, hidden_size=32)


def train(target, output, text, *, loop=LOOP, report=print):
    return train_mtp(target, output, text, MODULE, loop, report=report, announce=print)


@pytest.mark.parametrize("family", ["target", "nemotron"])
def test_a_trained_module_is_accepted_as_training_said(request, tmp_path, family):
    target = request.getfixturevalue(family)
    write_own_text(target, tmp_path / "own.jsonl")
    text = TrainingText(file=tmp_path / "own.jsonl")
    loop = replace(LOOP, steps=80, warmup_steps=10, batch_tokens=512)
    result = train(target, tmp_path, text, loop=loop)
    require_accepted(target, tmp_path, SPECULATION, result.acceptance_length)


def test_the_checkpoint_is_the_target_s_with_a_module_beside_it(target, text, tmp_path):
    train(target, tmp_path / "one", text)
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
    own = load_file(target / "model.safetensors")
    assert {name for name in index["weight_map"] if not name.startswith("mtp.")} == own.keys()
    copied = load_file(tmp_path / "one" / index["weight_map"]["lm_head.weight"])
    assert all(torch.equal(copied[name], own[name]) for name in own)
    # And again from there: the old module is left out.
    train(tmp_path / "one", tmp_path / "two", text, loop=replace(LOOP, seed=1))
    again = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert again["weight_map"].keys() == index["weight_map"].keys()
    open_llm(tmp_path / "two", speculative_config=SPECULATION)
    with pytest.raises(ConfigError, match="holds a model already"):
        train(target, tmp_path / "two", text)


def test_a_seed_names_the_bits_and_a_resumed_training_is_whole(target, text, tmp_path, cut_off):
    shard = "model-mtp.safetensors"
    loop = replace(LOOP, steps=13, checkpoint_every=5)
    train(target, tmp_path / "a", text, loop=loop)
    cut_off(train, target, tmp_path / "b", text, loop=loop)
    require_own_settings(train, target, tmp_path / "b", loop)
    train(target, tmp_path / "b", text, loop=replace(loop, resume=True))
    one, other = load_file(tmp_path / "a" / shard), load_file(tmp_path / "b" / shard)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_target_that_does_not_fit_the_device_is_one_error(target, text, tmp_path):
    require_one_error_without_memory(
        lambda: train(target, tmp_path / "out", text), DecoderNetwork, "to"
    )


def test_what_has_no_module_is_refused(target, text, tmp_path):
    with pytest.raises(UnsupportedError, match="no module"):
        train(write_llama(tmp_path / "llama"), tmp_path / "out", text)
    with pytest.raises(ConfigError, match="itself"):
        train(target, target, text)
    with pytest.raises(ConfigError, match="possible"):
        MTPOptions(ttt_steps=0)


@pytest.mark.parametrize(("row", "says"), MISFITS)
def test_text_that_does_not_fit_is_refused_before_the_weights_are_read(target, tmp_path, row, says):
    require_refused_early(train, target, tmp_path, row, says)


def test_mixed_precision_runs(target, text, tmp_path):
    require_mixed_precision(
        lambda name, loop: train(target, tmp_path / name, text, loop=loop), LOOP
    )

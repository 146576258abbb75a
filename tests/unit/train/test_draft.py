"""A drafter that is a model of its own, distilled from its target."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from helpers import training
from helpers.training import SIZES
from sametoken.errors import CheckpointError, ConfigError
from sametoken.models.loader import read_config
from sametoken.train.distillation import TrainingText
from sametoken.train.draft import train_draft
from sametoken.train.loop import CHECKPOINT
from sametoken.train.networks import DecoderNetwork
from sametoken.train.options import DraftOptions

K = 2
DRAFT = DraftOptions(hidden_size=32, num_layers=2, num_heads=2, verified_drafts=K)
LOOP = replace(training.LOOP, learning_rate=5e-3)


def train(target, output, text, *, draft=DRAFT, loop=LOOP, report=lambda now: None):
    return train_draft(target, output, text, draft, loop, report=report, announce=lambda line: None)


def test_a_trained_drafter_is_accepted_as_training_said(target, text, tmp_path):
    loop = replace(LOOP, steps=120, warmup_steps=10, batch_tokens=512)
    result = train(target, tmp_path, text, loop=loop)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": K}
    training.require_accepted(target, target, drafts, result.acceptance_length)


def test_a_seed_names_the_bits_and_the_config_is_the_target_s(target, text, tmp_path):
    for name in ("a", "b"):
        train(target, tmp_path / name, text)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    config = read_config(tmp_path / "a")
    assert config.vocab_size == SIZES["vocab_size"]
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == SIZES["max_position_embeddings"]


def test_an_interrupted_training_is_not_started_over(target, text, tmp_path, cut_off):
    loop = replace(LOOP, steps=12, checkpoint_every=4)
    cut_off(train, target, tmp_path, text, loop=loop)
    begun = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ConfigError, match="holds an unfinished training already") as refused:
        # The target is not there: nothing is read before.
        train(tmp_path / "none", tmp_path, text, loop=loop)
    assert "give --resume" in refused.value.remedy
    assert "remove it" in refused.value.remedy
    assert (tmp_path / CHECKPOINT).read_bytes() == begun
    training.require_own_settings(train, target, tmp_path, loop)
    assert train(target, tmp_path, text, loop=replace(loop, resume=True)).steps == 12


def test_a_drafter_whose_tokenizer_cannot_be_copied_is_no_model(
    target, text, tmp_path, monkeypatch
):
    def refuse(source, path):
        raise OSError("no space left on device")

    model = shutil.copytree(target, tmp_path / "target")
    (model / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(shutil, "copyfile", refuse)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be written"):
        train(model, tmp_path / "out", text)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock", CHECKPOINT}


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 30}, {"num_layers": 0}, {"intermediate_size": 0}]
)
def test_impossible_sizes_are_refused(changes):
    with pytest.raises(ConfigError, match="possible"):
        DraftOptions(**changes)


def test_sizes_beyond_all_models_are_refused_before_the_weights_are_read(target, text, tmp_path):
    unreadable = training.with_bad_weights(target, tmp_path / "target")
    with pytest.raises(CheckpointError, match="hidden_size=8388608 is not at most"):
        train(unreadable, tmp_path / "out", text, draft=replace(DRAFT, hidden_size=2**23))


def test_sequences_end_with_the_target_s_context(target, tmp_path):
    row = {"prompt_token_ids": [1] * 8, "output_token_ids": [2] * 300}
    (tmp_path / "text.jsonl").write_text(json.dumps(row))
    text, loop = TrainingText(file=tmp_path / "text.jsonl"), replace(LOOP, steps=1)
    result = train(target, tmp_path / "out", text, loop=replace(loop, max_length=10**12))
    assert result.tokens == SIZES["max_position_embeddings"] - 8


@pytest.mark.parametrize(("row", "says"), training.MISFITS)
def test_text_that_does_not_fit_is_refused_before_the_weights_are_read(target, tmp_path, row, says):
    training.require_refused_early(train, target, tmp_path, row, says)


def test_mixed_precision_runs(target, text, tmp_path):
    training.require_mixed_precision(
        lambda name, loop: train(target, tmp_path / name, text, loop=loop), LOOP
    )


def test_a_model_that_does_not_fit_the_device_is_one_error(target, text, tmp_path):
    training.require_one_error_without_memory(
        lambda: train(target, tmp_path, text), DecoderNetwork, "to"
    )

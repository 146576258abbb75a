"""The layout that is written, read by our loader and by transformers' own config class."""

from __future__ import annotations

import json
import os
import shutil
import stat
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from helpers.checkpoints import HIDDEN, VOCAB, head_tensors, write_llama
from helpers.full_disk import filling_disk
from sametoken.errors import ConfigError
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.loader import read_config
from sametoken.train.results import HeadLayout, write_head, write_with_module

MODULE = SimpleNamespace(mtp=torch.nn.Linear(2, 2))
OWN = ("checkpoint.pt", "text.jsonl", "training.json")


@pytest.fixture
def layout(tmp_path):
    config = read_config(write_llama(tmp_path / "target", rope_theta=50000.0))
    return HeadLayout(
        layer=config,
        draft_vocab_size=9,
        aux_layers=(1, 2, 4),
        norm_before_residual=True,
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


def test_a_head_that_cannot_be_written_whole_is_no_model(tmp_path, layout):
    with filling_disk(), pytest.raises(ConfigError, match="no space left"):
        write_head(tmp_path / "head", layout, {"norm.weight": torch.ones(2)})
    assert not (tmp_path / "head" / "config.json").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path, layout):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        write_head(tmp_path / "file" / "head", layout, {"norm.weight": torch.ones(2)})


@pytest.fixture
def two_shards(tmp_path):
    """A target, trained before, and the output of another training."""
    source, out = tmp_path / "source", tmp_path / "out"
    for directory in (source, out):
        directory.mkdir()
        for name in OWN:
            (directory / name).write_text(directory.name)
    for name in ("config.json", "README.md", "acceptance.json", "LICENSE"):
        (source / name).write_text("{}")
    # The index does not name it, and it has other weights of the same name.
    save_file({"model.a": torch.zeros(2)}, source / "left-over.safetensors")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, shard in zip("ab", shards, strict=True):
        save_file({f"model.{name}": torch.ones(2)}, source / shard)
    weight_map = {"weight_map": dict(zip(("model.a", "model.b"), shards, strict=True))}
    (source / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    return source, out


def test_a_target_of_two_shards_and_another_training_is_whole(two_shards):
    source, out = two_shards
    write_with_module(source, out, MODULE)
    files = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert files.keys() == {"model.a", "model.b", "mtp.weight", "mtp.bias"}
    assert all(name in load_file(out / file) for name, file in files.items())
    assert files["model.a"] == "model-00001-of-00002.safetensors"
    assert {(out / name).read_text() for name in OWN} == {"out"}
    assert (out / "LICENSE").exists()
    assert not (out / "README.md").exists()
    assert not (out / "acceptance.json").exists()
    assert not (out / "left-over.safetensors").exists()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.glob("*.safetensors")}
    assert modes == {0o644}


def test_a_target_that_cannot_be_copied_whole_is_no_model(two_shards, monkeypatch):
    source, out = two_shards
    copyfile = shutil.copyfile

    def copy_half(given, path):
        copyfile(given, path)
        if given.name.startswith("model-00002"):
            os.truncate(path, 9)
            raise OSError("no space left on device")

    monkeypatch.setattr(shutil, "copyfile", copy_half)
    with pytest.raises(ConfigError, match="no space left"):
        write_with_module(source, out, MODULE)
    written = {path.name for path in out.iterdir()}
    weights = {"model-mtp.safetensors", "model-00001-of-00002.safetensors"}
    assert written == {*OWN, "LICENSE", *weights}

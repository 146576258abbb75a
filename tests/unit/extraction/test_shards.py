"""Shards and manifests: read back as written, whole or not at all."""

from __future__ import annotations

import json

import pytest
import torch

from sametoken.errors import CheckpointError, ConfigError
from sametoken.extraction import shards
from sametoken.extraction.shards import (
    MANIFEST,
    ExtractedStates,
    Manifest,
    RowRange,
    SequenceEntry,
    Shard,
    StateSource,
    prompt_digest,
    read_manifest,
    write_manifest,
    write_shard,
)
from sametoken.models import safetensors_file

SOURCE = StateSource("a/model", "LlamaForCausalLM", 123, 4, 6, (2, 3), "bfloat16")
STATES = torch.arange(56).view(7, 2, 4).to(torch.bfloat16)
RANGES = {
    "one.safetensors": (RowRange(0, 0, 3), RowRange(1, 0, 1)),
    "two.safetensors": (RowRange(2, 0, 2), RowRange(0, 3, 4)),
}
SEQUENCES = (
    SequenceEntry("x", prompt_digest([1, 2]), 2, 4, True),
    SequenceEntry("y", prompt_digest([3]), 1, 1, False),
    SequenceEntry("z", prompt_digest([9]), 1, 2, True),
)


def tensors(first: int, last: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(first, last)
    return {
        "hidden_states": STATES[first:last].clone(),
        "token_ids": ids,
        "next_token_ids": ids + 100,
    }


def write_one(directory, file: str, first: int, last: int) -> Shard:
    return write_shard(directory, file, "run-1", RANGES[file], tensors(first, last))


@pytest.fixture
def manifest(tmp_path):
    one = write_one(tmp_path, "one.safetensors", 0, 4)
    two = write_one(tmp_path, "two.safetensors", 4, 7)
    return Manifest(SOURCE, complete=False, sequences=SEQUENCES, shards=(one, two))


@pytest.fixture
def directory(tmp_path, manifest):
    write_manifest(tmp_path, manifest)
    return tmp_path


def test_a_manifest_is_read_as_it_was_written(directory, manifest):
    assert read_manifest(directory) == manifest


def test_complete_sequences_are_put_together_from_their_ranges(directory):
    found = ExtractedStates(directory)
    assert len(found) == 2
    first, second = found[0], found[1]
    assert (first.request_id, first.prompt_len) == ("x", 2)
    assert first.token_ids.tolist() == [0, 1, 2, 6, 106]
    assert torch.equal(first.hidden_states, STATES[[0, 1, 2, 6]])
    assert second.token_ids.tolist() == [4, 5, 105]
    assert torch.equal(second.hidden_states, STATES[4:6])
    with pytest.raises(IndexError):
        found[2]


def test_a_write_that_fails_leaves_what_was_there(directory, monkeypatch):
    def fails(tensors, path, metadata):
        path.write_text("half a shard")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors_file, "save_file", fails)
    before = ExtractedStates(directory)[0]
    with pytest.raises(ConfigError, match="no space left") as caught:
        write_one(directory, "one.safetensors", 0, 4)
    assert "shared_storage_path" in caught.value.remedy
    assert torch.equal(ExtractedStates(directory)[0].hidden_states, before.hidden_states)


def test_damage_is_named(directory):
    (directory / "two.safetensors").write_bytes(b"\x07")
    with pytest.raises(CheckpointError, match=r"two\.safetensors is missing, truncated"):
        ExtractedStates(directory)[0]
    (directory / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors is missing"):
        ExtractedStates(directory)[1]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "holds no manifest.json"),
        ("{", "cannot be read"),
        ("[]", r"malformed \(the whole: Input should be an object\)\. Extract"),
        ('{"format": "another"}', "is of format 'another'"),
        (json.dumps({"format": shards.FORMAT}), r"malformed \(model: Field required\)\. Extract"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, text, cause):
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=cause):
        ExtractedStates(tmp_path)


def test_digests_tell_prompts_apart():
    prompts = ([], [1], [1, 2], [12], [2, 1])
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)
    assert prompt_digest((1, 2)) == prompt_digest([1, 2])

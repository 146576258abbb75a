"""Where extracted states go: directories that are made, taken up again, or refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from helpers.toy import toy_config
from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import NoDrafter
from sametoken.drafters.extract import CommittedRows
from sametoken.errors import CheckpointError, ConfigError, InvariantError
from sametoken.extraction.recording import NoExtraction, open_extraction
from sametoken.extraction.shards import (
    RowRange,
    SequenceEntry,
    Shard,
    read_manifest,
    write_manifest,
)
from sametoken.extraction.writer import CommittedRowsOutput, StateWriter
from sametoken.types.speculative_methods import EXTRACT


def opened(path, layers=(1, 2), model=None, **spec):
    config = SpeculativeConfig(EXTRACT, shared_storage_path=str(path), **spec)
    return open_extraction(config, Path("a/model"), model or toy_config(11), layers, torch.bfloat16)


def test_a_directory_is_made_and_taken_up_again(tmp_path):
    path = tmp_path / "new" / "states"
    assert isinstance(opened(path), StateWriter)
    manifest = read_manifest(path)
    assert manifest.source.eagle_aux_hidden_state_layer_ids == (1, 2)
    assert manifest.source.dtype == "bfloat16"
    assert isinstance(opened(path), StateWriter)


def test_a_home_directory_is_meant_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    opened("~/states")
    assert read_manifest(tmp_path / "states").sequences == ()


def test_states_of_another_kind_are_not_mixed_in(tmp_path):
    opened(tmp_path)
    sequences = (SequenceEntry("one", "", 2, 1, True),)
    shards = (Shard("a.safetensors", "", "", (RowRange(0, 0, 1),)),)
    some = replace(read_manifest(tmp_path), sequences=sequences, shards=shards)
    write_manifest(tmp_path, some)
    with pytest.raises(ConfigError, match=r"layer_ids=\(1, 2\), these have \(1, 3\)") as caught:
        opened(tmp_path, layers=(1, 3))
    assert "shared_storage_path" in caught.value.remedy
    with pytest.raises(ConfigError, match="vocab_size=11, these have 12"):
        opened(tmp_path, model=toy_config(12))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="malformed"):
        opened(tmp_path)


def test_a_directory_without_states_is_anybody_s(tmp_path):
    """A start that failed leaves one."""
    opened(tmp_path)
    opened(tmp_path, layers=(1, 3))
    assert read_manifest(tmp_path).source.eagle_aux_hidden_state_layer_ids == (1, 3)


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be created"):
            opened(path)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises((ConfigError, CheckpointError), match=r"manifest\.json cannot be"):
        opened(tmp_path)


def test_other_methods_record_nothing():
    drafter = NoDrafter()
    nothing = open_extraction(None, Path("a/model"), toy_config(11), (), torch.float32)
    assert isinstance(nothing, NoExtraction)
    assert nothing.wrap(drafter) is drafter


def rows(step_id: int) -> CommittedRows:
    ids = torch.arange(3) + step_id
    step_ids = torch.full((2,), step_id)
    return CommittedRows(step_ids, ids, ids + 1, ids + 2, ids + 3, torch.rand(3, 4))


def test_each_step_gets_its_own_rows_in_order():
    output, first, second = CommittedRowsOutput(), rows(1), rows(3)
    output.put(first)
    output.put(second)
    assert torch.equal(output.take(1).states, first.states)
    assert torch.equal(output.take(3).states, second.states)
    with pytest.raises(InvariantError, match="step 4 was processed before its rows were recorded"):
        output.take(4)


def test_rows_of_another_step_are_refused():
    output = CommittedRowsOutput()
    output.put(rows(5))
    with pytest.raises(InvariantError, match="step 4 has the rows of step 5"):
        output.take(4)


def test_what_is_taken_is_a_copy_of_what_was_put():
    output, given = CommittedRowsOutput(), rows(5)
    before = rows(5)
    output.put(given)
    for field in fields(CommittedRows)[1:5]:
        getattr(given, field.name).zero_()
    taken = output.take(5)
    for field in fields(CommittedRows)[:5]:
        assert torch.equal(getattr(taken, field.name), getattr(before, field.name)), field.name
    assert taken.states.data_ptr() != given.states.data_ptr()

"""A directory of extracted states: one writer at a time, and no byte that nobody wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.toy import toy_config
from sametoken.config import SpeculativeConfig
from sametoken.drafters.extract import CommittedRows
from sametoken.errors import CheckpointError, ConfigError
from sametoken.extraction.recording import open_extraction
from sametoken.extraction.shards import ExtractedStates, read_manifest
from sametoken.types.outputs import RequestResult, StepResult
from sametoken.types.plan import Admission, ScheduledRequest, StepPlan
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.speculative_methods import EXTRACT

LAYERS, HIDDEN, VOCAB = (1, 2), toy_config(50).hidden_size, 50
HOLDER = """
import sys, time
from pathlib import Path
from sametoken.io.files import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), "")
print("held", flush=True)
time.sleep(600)
"""


def opened(directory: Path):
    spec = SpeculativeConfig(EXTRACT, shared_storage_path=str(directory))
    return open_extraction(spec, Path("a/model"), toy_config(VOCAB), LAYERS, torch.float32)


def record(writer, name: str, num_rows: int, first: int = 0) -> None:
    """One request whose tokens count up from ``first``, and a shard that holds it."""
    positions = torch.arange(num_rows)
    states = torch.full((num_rows, len(LAYERS) * HIDDEN), float(first))
    slots = torch.zeros_like(positions)
    tokens = positions + first
    writer._rows.put(CommittedRows(torch.tensor([1]), slots, positions, tokens, tokens + 1, states))
    admission = Admission(0, (first,), 0, SamplingParams(seed=0), request_id=name)
    writer.launch(StepPlan(1, admissions=(admission,), requests=(ScheduledRequest(0, 1, 0, True),)))
    writer.process_output(StepResult(1, (RequestResult(0, 0, 0, (1,)),)))
    writer.end(name, num_rows + 1, aborted=False)
    writer.flush()


@pytest.fixture
def states(tmp_path) -> Path:
    writer = opened(tmp_path / "states")
    record(writer, "a", 4)
    record(writer, "b", 4, first=20)
    return tmp_path / "states"


def shard(directory: Path, number: int) -> Path:
    return directory / f"hidden_states-{number:05}.safetensors"


def read_all(directory: Path) -> list[list[int]]:
    found = ExtractedStates(directory)
    return [found[i].token_ids.tolist() for i in range(len(found))]


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path):
    first = opened(tmp_path)
    with pytest.raises(ConfigError, match=f"held by process {os.getpid()} on ") as caught:
        opened(tmp_path)
    assert "shared_storage_path" in caught.value.remedy
    record(first, "a", 4)
    assert read_all(tmp_path) == [[0, 1, 2, 3, 4]]
    del first
    record(opened(tmp_path), "b", 2)
    assert read_all(tmp_path) == [[0, 1, 2, 3, 4], [0, 1, 2]]


def test_the_lock_dies_with_a_killed_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"held by process {process.pid} on "):
            opened(tmp_path)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    record(opened(tmp_path), "a", 3)
    assert read_all(tmp_path) == [[0, 1, 2, 3]]


def test_a_writer_goes_on_where_another_was_killed(states):
    """Between a shard and the manifest that names it."""
    shard(states, 2).write_bytes(b"a shard that no manifest names")
    record(opened(states), "c", 2, first=40)
    assert read_all(states) == [[0, 1, 2, 3, 4], [20, 21, 22, 23, 24], [40, 41, 42]]
    manifest = read_manifest(states)
    writers = [one.writer for one in manifest.shards]
    assert writers[0] == writers[1] != writers[2]


def test_a_swapped_shard_is_noticed(states):
    shutil.copy(shard(states, 1), shard(states, 0))
    with pytest.raises(CheckpointError, match=r"hidden_states-00000\.safetensors is not the file"):
        read_all(states)


def test_a_shard_of_another_run_is_noticed(states, tmp_path):
    record(opened(tmp_path / "other"), "a", 4)
    shutil.copy(shard(tmp_path / "other", 0), shard(states, 0))
    other = read_manifest(tmp_path / "other").shards[0].writer
    with pytest.raises(CheckpointError, match=f"another run's .*{other}"):
        read_all(states)


@pytest.mark.parametrize("place", [8, 100, -1])
def test_an_edited_shard_is_noticed_even_once_it_was_read(states, place):
    found = ExtractedStates(states)
    assert found[0].token_ids.tolist() == [0, 1, 2, 3, 4]
    edited = bytearray(shard(states, 0).read_bytes())
    edited[place] ^= 1
    shard(states, 0).write_bytes(edited)
    with pytest.raises(CheckpointError, match=r"hidden_states-00000\.safetensors"):
        found[0]


def test_a_short_shard_is_noticed_before_anything_is_read(states):
    os.truncate(shard(states, 1), 40)
    with pytest.raises(CheckpointError, match=r"00001\.safetensors is missing, truncated"):
        ExtractedStates(states)


def set_at(*path):
    """A change of a manifest: the value at the end of the path."""
    *way, last, value = path

    def change(manifest):
        place = manifest
        for key in way:
            place = place[key]
        place[last] = value

    return change


CHANGES = {
    "a file outside": set_at("shards", 0, "file", "../states/hidden_states-00000.safetensors"),
    "an absolute file": set_at("shards", 0, "file", "/etc/passwd"),
    "a file twice": set_at("shards", 1, "file", "hidden_states-00000.safetensors"),
    "rows of nobody": set_at("shards", 0, "ranges", 0, "sequence", 7),
    "rows twice": set_at("shards", 1, "ranges", 0, "sequence", 0),
    "rows before the first": set_at("shards", 0, "ranges", 0, "start", -4),
    "rows that are not there": set_at("sequences", 0, "num_rows", 10**12),
    "words for numbers": set_at("sequences", 0, "num_rows", "4"),
    "an object for a list": set_at("sequences", {"0": 1}),
    "nothing for a list": set_at("shards", None),
    "no digest": set_at("shards", 0, "sha256", None),
    "another dtype": set_at("dtype", "__class__"),
    "sizes below zero": set_at("hidden_size", -1),
    "layers that are no list": set_at("eagle_aux_hidden_state_layer_ids", 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_was_edited_is_refused(states, change):
    path = states / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json is malformed"):
        ExtractedStates(states)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"format": ' + b"[" * 100_000,
        b'{"complete": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{",
        b"",
        b"\0" * 100,
    ],
)
def test_a_manifest_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        ExtractedStates(tmp_path)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        opened(tmp_path)


def test_more_rows_than_the_file_holds_are_refused_before_memory_is_set_aside(states):
    path = states / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["sequences"][0]["num_rows"] = manifest["shards"][0]["ranges"][0]["stop"] = 10**12
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"00000\.safetensors is missing, truncated"):
        ExtractedStates(states)

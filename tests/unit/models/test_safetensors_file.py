"""A safetensors file is whole, with all that it was given, and open to readers."""

from __future__ import annotations

import stat

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sametoken.models import safetensors_file
from sametoken.models.safetensors_file import write_safetensors


def test_a_file_is_read_as_it_was_written_by_every_user(tmp_path):
    path, rows = tmp_path / "a.safetensors", torch.arange(6.0).view(2, 3)
    write_safetensors(path, {"rows": rows, "columns": rows.T}, {"writer": "a test"})
    found = load_file(path)
    assert torch.equal(found["rows"], rows)
    assert torch.equal(found["columns"], rows.T)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "writer": "a test"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_write_that_fails_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": torch.ones(2)})

    def fails(tensors, path, metadata):
        path.write_text("half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors_file, "save_file", fails)
    with pytest.raises(OSError, match="no space left"):
        write_safetensors(path, {"a": torch.zeros(2)})
    assert torch.equal(load_file(path)["a"], torch.ones(2))
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]

"""Errors of a checkpoint's files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sametoken.errors import CheckpointError
from sametoken.models.load.files import read_json_object
from sametoken.models.load.gguf_file import read_gguf
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.pickled import load_tensors
from sametoken.text.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_json_object),
        ("model.gguf", read_gguf),
        ("model.safetensors", lambda path: open_weights(path.parent)),
        ("pytorch_model.bin", load_tensors),
        ("tokenizer.json", load_tokenizer),
    ],
)
def test_a_file_without_access_is_not_to_be_downloaded_again(name, read, tmp_path, monkeypatch):
    path, really_open = tmp_path / name, os.open
    path.touch()

    def refuse(opened, *args, **options):
        if Path(opened) == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(opened))
        return really_open(opened, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path} cannot be read (permission denied). "
        "Check its permissions, and those of its folders"
    )

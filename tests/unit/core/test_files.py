"""What is read is a regular file, and no deeper or larger than it should be."""

from __future__ import annotations

import os

import pytest

from sametoken.core.files import MAX_JSON_BYTES, is_there, open_regular, read_json


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"[1]")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"[1]"
    assert read_json(tmp_path / "link") == [1]


def test_nothing_else_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", "/dev/zero"):
        with pytest.raises(OSError, match=r"no regular file|No such file"):
            open_regular(path)


@pytest.mark.parametrize(("levels", "fits"), [(64, True), (300, False)])
def test_depth_is_bounded(tmp_path, levels, fits):
    (tmp_path / "file").write_text("[" * levels + "]" * levels)
    if fits:
        read_json(tmp_path / "file")
        return
    with pytest.raises(ValueError, match="recursion limit"):
        read_json(tmp_path / "file")


def test_size_is_bounded(tmp_path):
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", MAX_JSON_BYTES + 1)
    with pytest.raises(ValueError, match="larger than"):
        read_json(tmp_path / "file")


def test_a_link_to_nowhere_is_there(tmp_path):
    (tmp_path / "link").symlink_to("none")
    assert is_there(tmp_path / "link")
    assert not is_there(tmp_path / "none")

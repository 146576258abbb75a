"""Files are whole or not there."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from sametoken.bench.documents import read_json, write_json, write_text
from sametoken.errors import ConfigError


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"b": [1, 2.5, None, "é"]})
    assert read_json(path) == {"b": [1, 2.5, None, "é"]}
    assert [one.name for one in path.parent.iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def broken(*args, **options):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(ConfigError, match="no space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"'])
def test_what_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_json(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_json(tmp_path / "gone.json")


def test_what_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="give finite options"):
        write_json(tmp_path / "a.json", {"temperature": math.nan})
    assert not (tmp_path / "a.json").exists()


def test_a_link_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "link").symlink_to("file")
    for text in ("old", "new"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()


def test_a_file_has_the_rights_that_its_user_gives_to_files(tmp_path):
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "file", "a")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600

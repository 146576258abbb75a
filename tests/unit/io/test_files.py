"""Reads take regular files within limits; a write replaces a file whole or not at all."""

from __future__ import annotations

import os

import pytest

from helpers.full_disk import filling_disk
from sametoken.errors import ConfigError
from sametoken.io.files import (
    MAX_JSON_BYTES,
    copied,
    is_there,
    open_regular,
    read_json,
    replacing,
    require_writable,
    write_text,
)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"[1]")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"[1]"
    assert read_json(tmp_path / "link") == [1]


def test_nothing_else_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", "/dev/zero"):
        with pytest.raises(OSError, match=r"not a regular file|No such file"):
            open_regular(path)


@pytest.mark.parametrize("has_memory_files", [True, False])
def test_a_copy_stays_as_it_was(tmp_path, monkeypatch, has_memory_files):
    """In memory, or where the system has no such files (macOS) among temporary ones."""
    if not has_memory_files:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    (tmp_path / "file").write_bytes(b"as it was")
    with copied(tmp_path / "file") as copy:
        (tmp_path / "file").write_bytes(b"as it is now")
        assert copy.read_bytes() == b"as it was"
        assert not (tmp_path / "file").samefile(copy)
    assert not copy.exists()


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


@pytest.mark.parametrize("shared", [False, True])
def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path, shared):
    path = tmp_path / "file"
    for text in ("old", "new"):
        with replacing(path, shared=shared) as unfinished:
            unfinished.write_text(text)
            assert path.exists() == (text == "new")
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, shared, error):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with replacing(path, shared=shared) as unfinished:
            unfinished.write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_a_shared_file_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with replacing(path, shared=True) as first, replacing(path, shared=True) as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with filling_disk(), pytest.raises(ConfigError, match="no space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "link").symlink_to("file")
    for text in ("old", "new"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()


def test_a_text_has_the_rights_that_its_user_gives_to_files(tmp_path):
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "file", "a")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "file", []
    fsync = os.fsync

    def record(descriptor):
        synced.append((os.fstat(descriptor).st_size, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with replacing(path, synced=True) as unfinished:
        unfinished.write_text("text")
    assert synced == [(4, False)]
    with replacing(path) as unfinished:
        unfinished.write_text("text")
    assert len(synced) == 1


def test_what_cannot_be_written_is_said_beforehand(tmp_path):
    require_writable(tmp_path / "new")
    (tmp_path / "old").write_text("a")
    require_writable(tmp_path / "old")
    for path, why in ((tmp_path, "it is a directory"), (tmp_path / "no" / "a", "no directory")):
        with pytest.raises(ConfigError, match=why):
            require_writable(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["old"]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="it is not a regular file"):
        require_writable(pipe)
    with pytest.raises(OSError, match="not a regular file"), replacing(pipe) as unfinished:
        unfinished.write_text("text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_name_that_no_file_can_have_is_refused_beforehand(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be written .*too long"):
        require_writable(tmp_path / ("a" * 300))

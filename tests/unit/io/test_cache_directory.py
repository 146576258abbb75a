"""The cache directory and its locks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sametoken.errors import ConfigError
from sametoken.io.cache_directory import (
    cache_directory,
    expanded,
    make_cache_directory,
    untrusted_reason,
)
from sametoken.io.files import LOCK, DirectoryLock


@pytest.mark.parametrize(
    ("own", "shared", "wanted"),
    [
        ("/somewhere", "/xdg", "/somewhere"),
        ("~/x", "/xdg", "/home/me/x"),
        (None, "/xdg", "/xdg/sametoken"),
        (None, "~/xdg", "/home/me/xdg/sametoken"),
        ("", "", "/home/me/.cache/sametoken"),
        (None, None, "/home/me/.cache/sametoken"),
    ],
)
def test_the_environment_says_where(monkeypatch, own, shared, wanted):
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("SAMETOKEN_CACHE", own), ("XDG_CACHE_HOME", shared)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_directory() == Path(wanted)


def test_a_home_that_nobody_knows_is_named():
    with pytest.raises(ConfigError, match="~nobody-at-all/x"):
        expanded("~nobody-at-all/x")


def test_it_is_made_for_its_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("SAMETOKEN_CACHE", str(tmp_path / "a" / "b"))
    assert make_cache_directory() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    make_cache_directory()


def test_hands_of_others_are_named(tmp_path):
    path = tmp_path / "file"
    path.touch(0o600)
    assert untrusted_reason(path) is None
    path.chmod(0o664)
    assert untrusted_reason(path) == "users other than its owner may write it"
    (tmp_path / "link").symlink_to(path)
    assert untrusted_reason(tmp_path / "link") == "it is a symbolic link"


def test_one_at_a_time_and_the_next_once_it_is_closed(tmp_path):
    with (
        DirectoryLock(tmp_path, "wait"),
        pytest.raises(ConfigError, match=rf"held by process {os.getpid()} on .*\. Wait"),
    ):
        DirectoryLock(tmp_path, "wait")
    lock = DirectoryLock(tmp_path, "wait")
    del lock
    DirectoryLock(tmp_path, "wait").close()


def test_processes_started_meanwhile_do_not_hold_it(tmp_path):
    lock = DirectoryLock(tmp_path, "wait")
    wait = [sys.executable, "-c", "print(flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(wait, close_fds=False, **pipes) as process:
        assert process.stdout.readline() == b"\n"
        lock.close()
        DirectoryLock(tmp_path, "wait").close()
        process.communicate(b"\n")


def test_what_stands_in_its_place_is_not_written_to(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="cannot be locked"):
        DirectoryLock(tmp_path, "wait")
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(ConfigError, match="not a regular file"):
        DirectoryLock(tmp_path, "wait")
    with pytest.raises(ConfigError, match="cannot be locked"):
        DirectoryLock(tmp_path / "none", "wait")


def test_a_name_that_somebody_wrote_there_is_shown_as_text(tmp_path):
    lock = DirectoryLock(tmp_path, "wait")
    for written, shown in ((b"\x1b[2J\n\xff", r"held by \?\[2J\?"), (b"", "held by another")):
        (tmp_path / LOCK).write_bytes(written)
        with pytest.raises(ConfigError, match=shown):
            DirectoryLock(tmp_path, "wait")
    lock.close()

"""One writer at a time in a directory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sametoken.errors import ConfigError
from sametoken.io.files import LOCK, DirectoryLock


def test_one_at_a_time_and_the_next_once_it_is_closed(tmp_path):
    with (
        DirectoryLock(tmp_path, "wait"),
        pytest.raises(ConfigError, match=rf"held by process {os.getpid()} on .*\. wait"),
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
    with pytest.raises(ConfigError, match="no regular file"):
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

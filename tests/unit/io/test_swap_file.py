"""A file without a name: what is read is what was written, or the file is given up with a word."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from helpers.swap_files import wait_for_copies
from sametoken.errors import ConfigError
from sametoken.io import swap_file
from sametoken.io.swap_file import SwapFile

BLOCK = 5000


def held(count: int) -> list[bytearray]:
    return [bytearray([i + 1]) * BLOCK for i in range(count)]


def opened(tmp_path, blocks) -> SwapFile:
    return SwapFile(str(tmp_path), 9, lambda index: memoryview(blocks[index]))


def test_blocks_come_back_and_nobody_else_sees_the_file(tmp_path):
    blocks = held(4)
    file = opened(tmp_path, blocks)
    for place, block in ((8, 0), (2, 1)):
        file.write(place, block)
        assert file.finished(wait=True) == [(place, True)]
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(file._file.fileno()).st_mode) == 0o600
    for place, block in ((8, 2), (2, 3)):
        file.read(place, block)
        assert file.finished(wait=True) == [(place, True)]
    assert blocks[2:] == held(2)
    assert file.finished() == []


@pytest.mark.parametrize("damage", ["content", "length"])
def test_what_was_changed_is_refused_and_said_once(damage, tmp_path, caplog):
    file = opened(tmp_path, held(2))
    for place in (0, 1):
        file.write(place, place)
        file.finished(wait=True)
    if damage == "content":
        os.pwrite(file._file.fileno(), b"x", BLOCK + 7)
    else:
        os.ftruncate(file._file.fileno(), 2 * BLOCK - 1)
    file.read(0, 0)
    assert file.finished(wait=True) == [(0, True)]
    for _ in range(2):
        file.read(1, 1)
        assert file.finished(wait=True) == [(1, False)]
    assert file.num_blocks == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_disk_is_said_once_and_nothing_more_is_written(tmp_path, monkeypatch, caplog):
    file = opened(tmp_path, held(2))
    asked = []

    def full(*arguments):
        asked.append(arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        file.write(0, 0)
        assert file.finished(wait=True) == [(0, False)]
    assert len(asked) == 1
    assert "no space left on device" in caplog.text


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_hangs_is_given_up_and_what_comes_late_is_nobody_s(
    wait, tmp_path, monkeypatch, caplog
):
    blocks, answers = held(4), threading.Event()
    file = opened(tmp_path, blocks)
    file.write(3, 0)
    file.finished(wait=True)
    pread = os.pread

    def hanging(*arguments):
        answers.wait(60)
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", hanging)
    monkeypatch.setattr(swap_file, "MOST_SECONDS", 0.1)
    file.read(3, 1)
    file.write(5, 2)
    ended = file.finished(wait=wait)
    while not ended:
        time.sleep(0.01)
        ended = file.finished()
    assert sorted(ended) == [(3, False), (5, False)]
    assert file.num_blocks == 0
    assert "no copy has ended in 0.1 s" in caplog.text
    # Nothing waits for the worker any more.
    file.read(3, 1)
    assert file.finished(wait=True) == [(3, False)]
    answers.set()
    wait_for_copies(file)
    assert file.finished() == []
    assert blocks == held(4)
    assert len(caplog.records) == 1


def test_a_copy_that_ends_as_the_file_is_given_up_ends_once(tmp_path, monkeypatch):
    answers, has_ended = threading.Event(), threading.Event()
    file, pwrite = opened(tmp_path, held(1)), os.pwrite

    def hanging(*arguments):
        answers.wait(60)
        return pwrite(*arguments)

    class Lock:
        """The caller comes to it behind the worker, which it finds at its end."""

        def __init__(self):
            self.inner, self.caller = file._lock, threading.get_ident()

        def __enter__(self):
            if threading.get_ident() == self.caller:
                answers.set()
                assert has_ended.wait(60)
            self.inner.acquire()

        def __exit__(self, *error):
            self.inner.release()
            has_ended.set()

    file._lock = Lock()
    monkeypatch.setattr(os, "pwrite", hanging)
    monkeypatch.setattr(swap_file, "MOST_SECONDS", 0.01)
    file.write(5, 0)
    ended = []
    while not ended:
        ended = list(file.finished(wait=True))
    assert ended + list(file.finished()) == [(5, False)]


def test_the_process_ends_before_a_disk_that_hangs():
    code = """
import os, threading
from sametoken.io.swap_file import SwapFile
os.pwrite = lambda *arguments: threading.Event().wait()
file = SwapFile(".", 1, lambda index: memoryview(bytes(9)))
file.write(0, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_file_and_its_thread_end_with_the_last_reference(tmp_path):
    before = set(threading.enumerate())
    file = opened(tmp_path, held(1))
    (thread,) = set(threading.enumerate()) - before
    file.write(0, 0)
    file.finished(wait=True)
    raw = file._file
    del file
    thread.join(60)
    assert raw.closed


def test_a_slow_disk_is_no_hanging_one(tmp_path, monkeypatch):
    """Its copies take 80 s, each of them 20 s."""
    file, pwrite, now = opened(tmp_path, held(4)), os.pwrite, [0.0]

    def slow(*arguments):
        now[0] += 20
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(swap_file, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for place in range(4):
        file.write(place, place)
    ended = []
    while len(ended) < 4:
        ended += file.finished(wait=True)
    assert ended == [(place, True) for place in range(4)]


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot hold a file"):
        opened(tmp_path / "nowhere", [])

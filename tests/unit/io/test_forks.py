"""Calls in forks: shared out, for their files, and never waited for without end."""

from __future__ import annotations

import os
import resource
import signal
import time
from functools import partial

import pytest

from sametoken.io import forks
from sametoken.io.forks import call_in_forks


def note_process(path):
    """Leave the id of the calling process; slow enough that one fork does not make all calls."""
    path.write_text(str(os.getpid()))
    time.sleep(0.05)


def test_every_call_is_made_once_side_by_side(tmp_path):
    paths = [tmp_path / str(i) for i in range(8)]

    def note(path):
        with path.open("x"):
            pass
        note_process(path)

    call_in_forks([partial(note, path) for path in paths], most_forks=4, most_seconds=60)
    processes = {path.read_text() for path in paths}
    assert 2 <= len(processes) <= 4
    assert str(os.getpid()) not in processes


def test_a_call_that_raises_does_not_end_the_others(tmp_path):
    def fail():
        raise ValueError("no such instruction")

    note = partial(note_process, tmp_path / "note")
    call_in_forks([fail, note], most_forks=1, most_seconds=60)
    assert (tmp_path / "note").exists()


def test_a_fork_that_dies_loses_its_call_alone(tmp_path):
    calls = [lambda: os.kill(os.getpid(), signal.SIGKILL), partial(note_process, tmp_path / "note")]
    call_in_forks(calls, most_forks=2, most_seconds=60)
    assert (tmp_path / "note").exists()


def test_forks_that_are_late_are_killed(tmp_path):
    def never_end():
        note_process(tmp_path / "note")
        time.sleep(3600)

    begun = time.monotonic()
    call_in_forks([never_end], most_forks=1, most_seconds=1)
    assert time.monotonic() - begun < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "note").read_text()), 0)


def test_forks_do_not_outlive_their_parent_by_more_than_a_call(tmp_path):
    def take_a_note():
        (tmp_path / str(time.monotonic_ns())).touch()
        time.sleep(0.05)

    parent = os.fork()
    if not parent:
        try:
            call_in_forks([take_a_note] * 1000, most_forks=2, most_seconds=60)
        finally:
            os._exit(0)
    while not any(tmp_path.iterdir()):
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    time.sleep(1)
    num_notes = len(list(tmp_path.iterdir()))
    time.sleep(1)
    assert len(list(tmp_path.iterdir())) == num_notes < 1000


def test_what_is_not_yet_written_is_written_once(tmp_path):
    with (tmp_path / "file").open("w") as file:
        file.write("once")
        call_in_forks([lambda: None] * 2, most_forks=2, most_seconds=60)
    assert (tmp_path / "file").read_text() == "once"


def test_a_process_that_may_not_fork_makes_no_calls(tmp_path, monkeypatch):
    def refuse():
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(forks.os, "fork", refuse)
    call_in_forks([partial(note_process, tmp_path / "note")], most_forks=2, most_seconds=60)
    assert not (tmp_path / "note").exists()


def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd")
    call_in_forks([], most_forks=2, most_seconds=60)
    call_in_forks([lambda: None], most_forks=2, most_seconds=60)
    assert os.listdir("/proc/self/fd") == before


def test_an_interrupt_leaves_no_descriptor_open(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(forks.os, "fork", interrupt)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt):
        call_in_forks([lambda: None], most_forks=1, most_seconds=60)
    assert os.listdir("/proc/self/fd") == before


def test_descriptors_may_have_high_numbers(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        call_in_forks([(tmp_path / "note").touch], most_forks=1, most_seconds=60)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (tmp_path / "note").exists()

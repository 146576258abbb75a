"""A child process ends with its parent, and leaves nothing behind."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sametoken.io.child_process import spawn, status_text

PATIENCE_S = 60.0
CHILD = """
import sys
from pathlib import Path
from sametoken.io.child_process import Inbox, take_socket, temporary_directory

directory = temporary_directory(Path(sys.argv[2]), "made-")
print(directory.name, flush=True)
Inbox(take_socket(int(sys.argv[1]))).read_first()
"""


def test_its_directory_goes_with_the_parent_s_socket(tmp_path):
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs.fileno()), str(tmp_path)],
            stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    with process:
        directory = Path(process.stdout.readline().decode().strip())
        assert directory.parent == tmp_path
        (directory / "file").touch()
        ours.close()
        assert process.wait(PATIENCE_S) == 0
    assert not directory.exists()


SLOW_START = """
import sys
import time
from pathlib import Path

here = Path(__file__).parent
(here / "begun").touch()
while not (here / "go_on").exists():
    time.sleep(0.01)

from sametoken.io.child_process import Inbox, take_socket

Inbox(take_socket(int(sys.argv[1]))).read_first()
"""


def test_signals_of_the_group_end_no_child_that_is_starting(tmp_path, monkeypatch):
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    process, ours = spawn("slow_start")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    with process:
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        (tmp_path / "go_on").touch()
        ours.close()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("own_path", "status"), [([], 0), ([""], 3)])
def test_the_current_directory_is_imported_from_only_if_this_process_does(
    tmp_path, monkeypatch, own_path, status
):
    modules, here = tmp_path / "modules", tmp_path / "checkpoint"
    for folder in (modules, here):
        folder.mkdir()
    (modules / "asks_the_queue.py").write_text("import queue")
    (here / "queue.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(here)
    monkeypatch.setattr("sametoken.io.child_process.subprocess", subprocess)
    monkeypatch.setattr(sys, "path", [*own_path, str(modules), *filter(None, sys.path)])
    process, ours = spawn("asks_the_queue")
    with process, ours:
        assert process.wait(PATIENCE_S) == status


SPAWNS = """
from sametoken.io.child_process import spawn

process, ours = spawn("asks_for_streams")
raise SystemExit(process.wait())
"""


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_streams_that_this_process_lacks_are_empty_ones(tmp_path, closed):
    (tmp_path / "asks_for_streams.py").write_text(
        "import sys\nsys.exit(3 if None in (sys.stdout, sys.stderr) else 0)"
    )
    command = f"{shlex.join([sys.executable, '-c', SPAWNS])} {closed}"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path}
    assert subprocess.run(["sh", "-c", command], env=environment, check=False).returncode == 0


@pytest.mark.parametrize(
    ("status", "words"),
    [(3, "exit status 3"), (-15, "SIGTERM"), (-40, "signal 40"), (-9, "SIGKILL, as Linux")],
)
def test_every_way_to_end_has_words(status, words):
    assert status_text(status).startswith(words)

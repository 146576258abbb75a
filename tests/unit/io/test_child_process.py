"""A child process ends with its parent, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 60.0
CHILD = """
import sys
from sametoken.io.child_process import Inbox, take_socket, temporary_directory

directory = temporary_directory()
print(directory.name, flush=True)
Inbox(take_socket(int(sys.argv[1]))).read_first()
"""


def test_its_directory_goes_with_the_parent_s_socket(tmp_path):
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs.fileno())],
            stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    with process:
        directory = Path(process.stdout.readline().decode().strip())
        assert directory.parent == tmp_path
        (directory / "ranks").touch()
        ours.close()
        assert process.wait(PATIENCE_S) == 0
    assert not directory.exists()

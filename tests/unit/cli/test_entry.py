"""The command before its modules are loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: As process 1 of a container, which no signal ends that it does not handle.
_ENDED_IMPORT = """
import os, signal, sys
os.getpid = lambda: 1
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "sametoken.cli.main":
            signal.raise_signal(signal.{name})
sys.meta_path.insert(0, Finder())
from sametoken.__main__ import main
main()
"""


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_modules_are_loaded_leaves_no_traceback(name, status):
    command = [sys.executable, "-c", _ENDED_IMPORT.format(name=name)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (status, "")


@pytest.mark.parametrize("imported", ["sametoken", "sametoken.__main__"])
def test_windows_is_refused_before_a_module_that_it_lacks(imported):
    code = f"import os, importlib; os.name = 'nt'; importlib.import_module({imported!r})"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.stderr.splitlines()[-1].startswith(
        "ImportError: sametoken does not run on Windows"
    )

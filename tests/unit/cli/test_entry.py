"""The command before its modules are loaded."""

from __future__ import annotations

import subprocess
import sys

_INTERRUPTED_IMPORT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "sametoken.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from sametoken.__main__ import main
main()
"""


def test_an_interrupt_while_modules_are_loaded_leaves_no_traceback():
    command = [sys.executable, "-c", _INTERRUPTED_IMPORT]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")

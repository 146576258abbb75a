"""Python in a process of its own, and which modules a command has loaded there."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence

MODULES_AFTER = "import sys; print([m for m in {heavy!r} if m in sys.modules])"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_command(arguments: Sequence[str], heavy: Sequence[str]) -> tuple[str, list[str]]:
    """What ``sametoken`` prints, and those of the heavy modules that it has loaded."""
    code = (
        "import sys\n"
        f"sys.argv = ['sametoken', *{list(arguments)!r}]\n"
        "from sametoken.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
    )
    *shown, loaded = run_python(code + MODULES_AFTER.format(heavy=tuple(heavy))).splitlines()
    return "\n".join(shown), ast.literal_eval(loaded)

"""Whether somebody watches."""

from __future__ import annotations

import sys


def stderr_is_terminal() -> bool:
    """Whether stderr shows bars; a process may be without one."""
    return bool(sys.stderr and sys.stderr.isatty())

"""A console whose tables are whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 120


def wide_console() -> Console:
    """As wide as the terminal; where there is none, wide enough for the tables of ``bench``."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)

"""A console whose closed pipe is the command's to tell."""

from __future__ import annotations

from rich.console import Console as RichConsole


class Console(RichConsole):
    """rich's, except that a closed pipe raises on, as ``cli.main`` expects."""

    def on_broken_pipe(self) -> None:
        """See rich, which would exit with 1."""
        raise  # rich calls this from its except clause.

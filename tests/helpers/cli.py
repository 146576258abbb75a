"""The command line within this process."""

from __future__ import annotations

from typer.testing import CliRunner

from sametoken.cli.main import app


def invoke(*arguments: object, **options):
    """What a command says, and its exit status."""
    return CliRunner().invoke(app, [*map(str, arguments)], **options)

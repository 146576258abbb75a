"""The ``sametoken`` command. Commands import torch only when they run."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

import sametoken
from sametoken.cli import INTERRUPTED
from sametoken.cli.audit import audit
from sametoken.cli.batch import batch
from sametoken.cli.bench import bench
from sametoken.cli.chat import chat
from sametoken.cli.demo import demo
from sametoken.cli.env import env
from sametoken.cli.eval import evaluate
from sametoken.cli.generate import generate
from sametoken.cli.help import show_help
from sametoken.cli.quantize import write_quantized
from sametoken.cli.sections import SectionedCommand, SectionedGroup
from sametoken.cli.serve import serve
from sametoken.cli.train import train
from sametoken.cli.vllm_flags import ServeCommand
from sametoken.config import DEFAULT_MODEL
from sametoken.errors import SametokenError, in_words

NO_COMMAND = 2
BROKEN_PIPE = 141
BAD_PATH = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# A name that the user gave is the cause; ``Path.exists`` and its like raise these as they are.
_BAD_PATH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


#: Groups of commands in the help.
RUN, MEASURE, ABOUT = "Run a model", "Check, measure and train", "About"


class _Group(SectionedGroup):
    """Turns expected errors into one line and an exit code, without a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _told():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _told():
            return super().invoke(ctx)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Tell expected errors, and flush what was written."""
    try:
        yield
        sys.stdout.flush()
    except SametokenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        _discard_stdout()
        raise typer.Exit(BROKEN_PIPE) from error
    except OSError as error:
        if error.errno in _NO_ROOM:
            _discard_stdout()
            what, remedy = "written", "Make room"
        elif error.errno in _BAD_PATH and error.filename is not None:
            what, remedy = "used", "Check the name, and the permissions of its folders"
        else:
            raise
        where = error.filename or "the output"
        typer.echo(f"error: {where} cannot be {what} ({in_words(error)}). {remedy}", err=True)
        raise typer.Exit(BAD_PATH) from error


class _Stderr(io.TextIOWrapper):
    """A stderr whose text is lost where it cannot be written: no result depends on it."""

    def write(self, text: str) -> int:
        """See ``io.TextIOWrapper``; only a closed pipe raises."""
        with _lost():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """See ``write``."""
        with _lost():
            super().flush()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


def _discard_stdout() -> None:
    """Redirect stdout to the null device, for the interpreter's flush at exit."""
    # A test may replace stdout by a stream without a file descriptor.
    with contextlib.suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=_Group,
    help="LLM inference whose speculative decoding never changes a token.",
    epilog="sametoken help speculative lists the keys of --speculative-config.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(rich_help_panel=RUN)(chat)
app.command(rich_help_panel=RUN, no_args_is_help=True)(generate)
app.command(rich_help_panel=RUN, no_args_is_help=True)(serve)
app.command(rich_help_panel=RUN, no_args_is_help=True)(batch)
app.command(rich_help_panel=RUN)(demo)
app.command(rich_help_panel=MEASURE, no_args_is_help=True)(audit)
app.add_typer(bench, name="bench", cls=SectionedGroup, rich_help_panel=MEASURE)
app.command(name="eval", rich_help_panel=MEASURE, no_args_is_help=True)(evaluate)
app.add_typer(train, name="train", cls=SectionedGroup, rich_help_panel=MEASURE)
app.command(name="quantize", rich_help_panel=MEASURE, no_args_is_help=True)(write_quantized)
app.command(rich_help_panel=ABOUT)(env)
app.command(name="help", rich_help_panel=ABOUT)(show_help)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sametoken {sametoken.__version__}")
        raise typer.Exit


@app.command(name="version", rich_help_panel=ABOUT)
def _version() -> None:
    """Show the version."""
    _show_version(True)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    """LLM inference whose speculative decoding never changes a token."""
    if context.invoked_subcommand is None:
        _offer_chat(context)


def _offer_chat(context: typer.Context) -> None:
    """Ask a person for a chat; print the help to everyone else."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_terminal or not typer.confirm(f"Start a chat with {DEFAULT_MODEL}?", default=True):
        typer.echo(context.get_help())
        raise typer.Exit(0 if is_terminal else NO_COMMAND)
    app(["chat"])


for _group in (app, bench, train):
    for _info in _group.registered_commands:
        _info.cls = ServeCommand if _info.callback is serve else SectionedCommand


def main() -> None:
    """Run the command line and exit with its status."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _Stderr(
            sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True
        )
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # None if the caller has closed it.
        if getattr(sys, name) is None:
            null = open(os.devnull, mode, encoding="utf-8", errors="replace")  # noqa: SIM115
            setattr(sys, name, null)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Generated text may contain characters that the locale's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    app()

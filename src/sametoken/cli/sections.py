"""Help in sections: options under their panel's heading, commands under theirs, in sentences.

Typer's own panels shorten the names of long options; these never do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

#: A word with a capital, a digit or an underscore in it.
NAME = re.compile(r".+[A-Z0-9_].*")
#: Begins a default that a help text states itself.
_DEFAULT = " [default: "
#: Characters, more than any first sentence of a command's help has.
_FIRST_SENTENCE = 200
_OPTIONS, _COMMANDS, _ARGUMENTS = "Options", "Commands", "Arguments"


def as_sentence(text: str) -> str:
    """A help text with a capital letter and a full stop, which a default in brackets follows.

    Names at its beginning, such as vLLM and gsm8k, keep their spelling.
    """
    sentence, bracket, default = text.partition(_DEFAULT)
    # A text that is shown a second time is a sentence already.
    sentence = sentence.rstrip()
    first, _, _ = sentence.partition(" ")
    start = sentence[:1] if NAME.fullmatch(first) else sentence[:1].upper()
    stop = "." if sentence and sentence[-1] not in ".]" else ""
    # Two spaces, as before the defaults that Typer writes.
    return f"{start}{sentence[1:]}{stop}" + (f" {bracket}{default}" if bracket else "")


class SectionedCommand(TyperCommand):
    """A command whose options stand under the headings of their panels."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; another engine's ``--model`` is told where the model stands."""
        try:
            return super().parse_args(ctx, args)
        # Typer does not export the class of unknown options.
        except Exception as error:
            takes_model = any(one.name == "model" for one in self.params)
            if getattr(error, "option_name", None) != "--model" or not takes_model:
                raise
            usage = f"the model stands alone, as in {ctx.command_path} MODEL"
            raise typer.BadParameter(usage, ctx=ctx, param_hint="'--model'") from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _write_parameters(self, ctx, formatter)


class SectionedGroup(TyperGroup):
    """A group whose options and commands stand under the headings of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, then commands."""
        _write_parameters(self, ctx, formatter)
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        _write(
            formatter,
            (
                (_panel(command) or _COMMANDS, name, command.get_short_help_str(_FIRST_SENTENCE))
                for name, command in commands
                if command is not None and not command.hidden
            ),
        )


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    entries = []
    for parameter in command.get_params(ctx):
        is_argument = parameter.param_type_name == "argument"
        parameter.help = as_sentence(parameter.help or "")
        record = parameter.get_help_record(ctx)
        if record is not None:
            entries.append(
                (_panel(parameter) or (_ARGUMENTS if is_argument else _OPTIONS), *record)
            )
    _write(formatter, entries)


def _panel(one: Any) -> str | None:
    panel: str | None = getattr(one, "rich_help_panel", None)
    return panel


def _write(formatter: Any, entries: Iterable[tuple[str, str, str]]) -> None:
    """Write (heading, name, text) entries; a heading stands where it comes first."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for heading, name, text in entries:
        sections.setdefault(heading, []).append((typer.style(name, fg="cyan"), text))
    for heading, lines in sections.items():
        with formatter.section(typer.style(heading, bold=True)):
            formatter.write_dl(lines)

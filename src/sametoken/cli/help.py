"""``sametoken help``: the help of a command, and the keys of ``--speculative-config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from sametoken.cli.sections import as_sentence
from sametoken.config import SpeculativeConfig
from sametoken.errors import ConfigError
from sametoken.types.option_values import suggestion
from sametoken.types.speculative_config import HEAD_NUM_TOKENS
from sametoken.types.speculative_methods import DRAFTING, HEADS, METHODS, TABLE

SPECULATIVE = "speculative"
_INTRODUCTION = """\
--speculative-config takes a method's name, or a JSON object with these keys, for example
'{"method": "ngram", "num_speculative_tokens": 4}'. No value changes a token."""
_FORMS = {
    "str": "text",
    "str | None": "text",
    "float | None": "number",
    "tuple[float, ...] | None": "list of numbers",
    "tuple[int, ...] | None": "list of integers",
}
_OF_ALL = {METHODS: "all", DRAFTING: "all that draft", HEADS: "draft heads"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a speculative config, in words."""

    name: str
    values: str
    default: str
    methods: str
    meaning: str


def show_help(
    context: typer.Context,
    topic: Annotated[list[str] | None, typer.Argument(help="a command, or speculative")] = None,
    markdown: Annotated[
        bool, typer.Option(help="print the table of docs/speculative.md; with speculative alone")
    ] = False,
) -> None:
    """Show the help of a command, or all keys of --speculative-config."""
    words = topic or []
    if words == [SPECULATIVE]:
        if markdown:
            typer.echo(as_markdown(speculative_keys()))
        else:
            _show_keys(speculative_keys())
        return
    if markdown:
        raise ConfigError("--markdown is for the table of keys", "give speculative")
    assert context.parent is not None
    typer.echo(_command_help(context.parent, words))


def _command_help(root: Any, words: Iterable[str]) -> str:
    """The help of a command or group."""
    context = root
    for word in words:
        commands = getattr(context.command, "commands", {})
        if word not in commands:
            known = [*commands, *([SPECULATIVE] if context is root else [])]
            raise ConfigError(f"there is no help on {word!r}", suggestion(word, known))
        context = type(root)(commands[word], info_name=word, parent=context)
    text: str = context.get_help()
    return text


def speculative_keys() -> list[Key]:
    """Every key of ``SpeculativeConfig``, in its order."""
    return [
        Key(
            one.name,
            _values(one),
            _default(one),
            _OF_ALL.get(one.metadata["methods"], ", ".join(one.metadata["methods"])),
            one.metadata["help"],
        )
        for one in dataclasses.fields(SpeculativeConfig)
    ]


def as_markdown(keys: Iterable[Key]) -> str:
    """The table of the docs."""
    lines = ["| key | values | default | read by | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{key.name}` | {key.values} | {key.default} | {key.methods} | {key.meaning} |"
        for key in keys
    ]
    return "\n".join(lines)


def _show_keys(keys: Iterable[Key]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from sametoken.cli.console import Console

    console = Console(highlight=False)
    console.print(_INTRODUCTION, soft_wrap=True)
    for key in keys:
        console.print(Text.assemble("\n", (key.name, "bold cyan"), f"  {key.values}"))
        console.print(Padding(Text(as_sentence(key.meaning)), (0, 0, 0, 4)))
        facts = f"Default: {key.default}. Read by: {key.methods}."
        console.print(Padding(Text(facts, style="dim"), (0, 0, 0, 4)))


def _values(one: dataclasses.Field[Any]) -> str:
    if choices := one.metadata["choices"]:
        return ", ".join(choices)
    if limits := one.metadata["limits"]:
        return f"{limits[0]}..{limits[1]}"
    return _FORMS[str(one.type)]


def _default(one: dataclasses.Field[Any]) -> str:
    if one.name == "num_speculative_tokens":
        known = ", ".join(
            f"{name} {one.num_tokens}" for name, one in TABLE.items() if one.num_tokens
        )
        return (
            f"{known}, suffix its tree's depth; other heads what their config.json states, else "
            f"{HEAD_NUM_TOKENS}"
        )
    return "none" if one.default in (None, "") else str(one.default)

"""``sametoken chat``: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any

import typer

from sametoken.cli.conversation import OFF, Chat, Consoles
from sametoken.cli.options import (
    adapter_option,
    engine_options,
    options_of,
    sampling_options,
    split_options,
    with_options,
)
from sametoken.config import DEFAULT_MODEL, MODEL_HELP, EngineConfig
from sametoken.serving.http.config import ServerConfig

#: An answer may be longer than ``generate``'s default.
MAX_TOKENS = 1024
PROMPT = "> "
#: What a server reads answers by.
_READS = "reasoning_parser"
_OTHERS = tuple(one.name for one in fields(ServerConfig) if one.name != _READS)


def default_drafts(model: str) -> str:
    """The method that drafts unless one is given: the head that ships, else text matches."""
    return "eagle3" if model == DEFAULT_MODEL else "suffix"


@with_options(
    adapter_option(),
    sampling_options(MAX_TOKENS),
    options_of(ServerConfig, _OTHERS),
    engine_options(),
)
def chat(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="system message of the conversation")] = None,
    **options: Any,
) -> None:
    """Chat with a model; accepted drafts are green, reasoning is dim.

    Without --speculative-config, smollm2 drafts by eagle3 and other models by suffix; off drafts
    nothing. A line is a message, or a command if it begins with /: /help lists them. Ctrl-C stops
    an answer, Ctrl-D leaves. From a pipe every line is answered in turn. A model that recommends
    no sampling answers with temperature 0.2 and top_p 0.9, unless --generation-config is vllm.
    """
    reasoning = ServerConfig(reasoning_parser=options.pop(_READS))
    adapter = options.pop("lora_request")
    engine, sampling = split_options(options)
    if engine["speculative_config"] is None:
        engine["speculative_config"] = default_drafts(model)
    elif engine["speculative_config"] == OFF:
        engine["speculative_config"] = None
    config = EngineConfig.from_options(model=model, **engine)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    consoles = _consoles(interactive)
    session = Chat(config, sampling, reasoning, consoles, adapter, interactive=interactive)
    session.set_system(system or "")
    session.start()
    for line in _lines(interactive):
        if not session.take(line):
            return


def _consoles(interactive: bool) -> Consoles:
    from sametoken.cli.console import Console

    # None asks the terminal, also whether it has colours.
    is_terminal = None if interactive else False
    plain: dict[str, Any] = {"highlight": False, "soft_wrap": True, "force_terminal": is_terminal}
    return Consoles(Console(**plain), Console(stderr=True, **plain))


def _lines(interactive: bool) -> Iterator[str]:
    """The user's lines, until Ctrl-D or the end of the pipe; Ctrl-C drops a terminal's line."""
    if interactive:
        with contextlib.suppress(ImportError):
            # Gives ``input`` a history and the arrow keys.
            import readline  # noqa: F401
    while True:
        try:
            yield input(PROMPT if interactive else "")
        except EOFError:
            if interactive:
                typer.echo()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            typer.echo("\nCtrl-D or /quit leaves the chat.", err=True)

"""``sametoken generate``: stream the completion of one prompt."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sametoken.cli.options import (
    adapter_option,
    engine_options,
    sampling_options,
    split_options,
    with_options,
)
from sametoken.cli.report import announce, as_json, compared, explain, first_difference, summary
from sametoken.config import DEFAULT_MODEL, MODEL_HELP, EngineConfig
from sametoken.errors import in_words
from sametoken.types.lora_modules import require_adapter
from sametoken.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sametoken.engine.unloaded import UnloadedModel
    from sametoken.engine.user_inputs import PromptTokens
    from sametoken.llm import LLM
    from sametoken.types.outputs import RequestOutput


#: Exit status of ``--compare`` if a token differs; that of a failed audit.
TOKENS_DIFFER = 1


@with_options(adapter_option(), sampling_options(), engine_options())
def generate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option(help="text to continue")] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="file to continue; - reads stdin")
    ] = None,
    chat: Annotated[
        str | None, typer.Option(help="message to answer, through the chat template")
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="print one JSON object at the end in place of text")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="answer without drafts first and print both speeds; exits with 1 if a token "
            "differs",
        ),
    ] = False,
    show_settings: Annotated[
        bool, typer.Option("--explain", help="print every setting and the reason for it")
    ] = False,
    **options: Any,
) -> None:
    """Continue a text or answer a message."""
    is_asked = _require_one_source((prompt, file, chat), or_none=show_settings)
    text = _read(file) if file is not None else prompt
    adapter = options.pop("lora_request")
    engine, sampling = split_options(options)
    # What is impossible is refused before a model is looked at, and then before it is loaded.
    SamplingParams(**sampling)
    if json_output and not is_asked:
        raise typer.BadParameter("--json prints an answer: give --prompt, --file or --chat")
    config = EngineConfig.from_options(model=model, **engine)
    if compare and (json_output or config.speculative_config is None):
        raise typer.BadParameter("--compare needs --speculative-config, and prints no JSON")
    require_adapter(config.lora_modules, adapter)
    unloaded = _look_at(config)
    asked = _ask(unloaded, text, chat, sampling) if is_asked else None
    plain = None
    if compare and asked is not None:
        plain = _stream(_load(_without_drafts(unloaded)), asked, adapter, _ignore)
    llm = _load(unloaded)
    if show_settings:
        # Beside an answer, which has stdout for itself.
        typer.echo(explain(llm.resolved), err=is_asked)
    if asked is None:
        return
    output = _stream(llm, asked, adapter, _ignore if json_output else _write)
    synthetic = llm.resolved.config.synthetic
    if json_output:
        typer.echo(json.dumps(as_json(output, synthetic), ensure_ascii=False))
        return
    typer.echo()
    announce(summary(output, synthetic))
    if plain is not None:
        announce(compared(plain, output))
        if first_difference(plain, output) is not None:
            raise typer.Exit(TOKENS_DIFFER)


def _require_one_source(sources: Sequence[str | None], *, or_none: bool) -> bool:
    """Check that a prompt is given once; whether it is."""
    num_given = sum(source is not None for source in sources)
    if num_given > 1:
        raise typer.BadParameter("give only one of --prompt, --file and --chat")
    if num_given == 0 and not or_none:
        raise typer.BadParameter("give one of --prompt, --file and --chat")
    return num_given == 1


def _look_at(config: EngineConfig) -> UnloadedModel:
    from sametoken.engine.unloaded import UnloadedModel

    return UnloadedModel.of(config, announce)


def _without_drafts(unloaded: UnloadedModel) -> UnloadedModel:
    from sametoken.engine.load import validate

    plain = dataclasses.replace(unloaded.requested.located, speculative_config=None)
    return dataclasses.replace(unloaded, requested=validate(plain, announce))


def _load(unloaded: UnloadedModel) -> LLM:
    from sametoken.llm import LLM

    return LLM.from_unloaded(unloaded, announce)


def _ask(
    unloaded: UnloadedModel, text: str | None, chat: str | None, sampling: dict[str, Any]
) -> tuple[PromptTokens, SamplingParams]:
    """Make a request of the text or the message.

    Raises:
        RequestError: the model cannot serve it.
    """
    params = dataclasses.replace(unloaded.get_default_sampling_params(), **sampling)
    if chat is not None:
        prompt = unloaded.inputs.tokenize_chat([{"role": "user", "content": chat}])
    else:
        prompt = unloaded.inputs.tokenize(text or "")
    unloaded.inputs.process("", prompt, params)
    return prompt, params


def _stream(
    llm: LLM,
    asked: tuple[PromptTokens, SamplingParams],
    adapter: str | None,
    show: Callable[[str], None],
) -> RequestOutput:
    """Run one request, by an adapter if one is named, and stream its text.

    Raises:
        NumericalError: the request failed.
    """
    num_shown = 0
    for output in llm.generate_stream(*asked, lora_request=adapter):
        completion = output.outputs[0]
        show(completion.text[num_shown:])
        num_shown = len(completion.text)
    if completion.error is not None:
        raise completion.error
    return output


def _read(name: str) -> str:
    try:
        if name == "-":
            if isinstance(sys.stdin, io.TextIOWrapper):
                # Python lets other bytes than the encoding's through, as surrogates.
                sys.stdin.reconfigure(encoding="utf-8", errors="strict")
            return sys.stdin.read()
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{name} cannot be read as text: {in_words(error)}") from error


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _ignore(piece: str) -> None:
    pass

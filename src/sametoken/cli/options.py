"""Command-line options made from the dataclasses that define them."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.errors import ConfigError, shown
from sametoken.types.lora_modules import LoRAModule
from sametoken.types.option_values import parse_integer
from sametoken.types.sampling_params import RECOMMENDED, SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]
#: The sampling parameters of the command line.
SAMPLING_HELP: Mapping[str, str] = {
    "max_tokens": "maximum number of output tokens",
    "min_tokens": "minimum number of output tokens before a stop",
    "temperature": "sampling temperature; 0 is greedy",
    "top_k": "keep the k most likely tokens; 0 keeps all",
    "top_p": "keep the most likely tokens up to this total probability",
    "min_p": "keep tokens with at least this fraction of the highest probability",
    "presence_penalty": "subtract this from the logits of tokens in the output",
    "frequency_penalty": "subtract this once per occurrence of a token in the output",
    "repetition_penalty": "values above 1 lower the logits of tokens in prompt and output",
    "seed": "seed of the noise; the same seed gives the same text",
    "stop": "stop before this text; may be repeated",
    "ignore_eos": "continue after the end-of-text token",
}
#: The default at a terminal; the API's default is 16 tokens.
MAX_TOKENS = 256
_SAMPLING = "Sampling options"
#: Fields of EngineConfig that commands define themselves or that only servers need.
_NOT_OPTIONS = ("model", "skip_tokenizer_init", "seed")


def with_options(*groups: list[inspect.Parameter]) -> Callable[[Function], Function]:
    """Replace the ``**options`` of a command's signature by the groups' parameters."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        generated = [parameter for group in groups for parameter in group]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *generated]
        )
        return function

    return decorate


def options_in(function: Callable[..., None]) -> list[inspect.Parameter]:
    """The parameters of a function without a body: options that several commands share."""
    return list(inspect.signature(function, eval_str=True).parameters.values())


def take(options: dict[str, Any], group: type[Any] | Sequence[inspect.Parameter]) -> dict[str, Any]:
    """Remove the options of a group, or of a dataclass's fields, and return them."""
    members: Sequence[Any] = dataclasses.fields(group) if isinstance(group, type) else group
    return {one.name: options.pop(one.name) for one in members}


def numbers(name: str, text: str, kind: type[Any] = int, remedy: str = "give 1,8,64") -> list[Any]:
    """Parse the list of finite numbers that an option is.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = [kind(part) for part in text.split(",")]
        if not all(map(math.isfinite, found)):
            raise ValueError("a number is not finite")
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{name}={shown(text)} is not a list of numbers", remedy) from error
    return found


def engine_options(**defaults: Any) -> list[inspect.Parameter]:
    """Make one option per field of ``EngineConfig``.

    Args:
        defaults: defaults of the command that differ from the dataclass's.
    """
    return options_of(EngineConfig, _NOT_OPTIONS, **defaults)


def options_of(
    config: type[Any], leave_out: Sequence[str] = (), **defaults: Any
) -> list[inspect.Parameter]:
    """Make one option per field of a dataclass whose fields are made by ``config.option``.

    Args:
        config: the dataclass.
        leave_out: fields that are not options.
        defaults: defaults of the command that differ from the dataclass's.
    """
    hints = typing.get_type_hints(config)
    parameters = []
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        kind, default = hints[field.name], defaults.get(field.name, field.default)
        choices = field.metadata["choices"]
        if kind == (SpeculativeConfig | None):
            kind = str | None
        if kind in (tuple[str, ...], tuple[LoRAModule, ...]):
            kind, default = list[str], list(default)
        parameters.append(
            _parameter(
                *(field.name, kind, default, field.metadata["help"]),
                *field.metadata["spellings"],
                metavar=f"[{'|'.join(choices)}]" if choices else None,
                rich_help_panel=_panel(config),
            )
        )
    return parameters


def adapter_option() -> list[inspect.Parameter]:
    """Make the option by which a command's requests choose their adapter."""
    text = "adapter of --lora-modules that answers, by its name"
    return [_parameter("lora_request", str | None, None, text, metavar="NAME")]


def sampling_options(max_tokens: int = MAX_TOKENS) -> list[inspect.Parameter]:
    """Make the sampling options; those not given use the model's recommended values.

    Args:
        max_tokens: the command's default.
    """
    hints = typing.get_type_hints(SamplingParams)
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    parameters = []
    for name, text in SAMPLING_HELP.items():
        kind, default, shown = hints[name], defaults[name], ""
        if name == "max_tokens":
            kind, default = int, max_tokens
        elif name == "stop":
            kind, default = list[str] | None, None
        elif name in RECOMMENDED.values():
            kind, default, shown = kind | None, None, f"the model's, else {default}"
        parameters.append(
            _parameter(
                *(name, kind, default, text), show_default=shown or True, rich_help_panel=_SAMPLING
            )
        )
    return parameters


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a command's options into those of the engine and those of sampling."""
    sampling = {
        name: value
        for name, value in options.items()
        if name in SAMPLING_HELP and value not in (None, [])
    }
    engine = {name: value for name, value in options.items() if name not in SAMPLING_HELP}
    return engine, sampling


def _integer(given: str | int) -> int:
    try:
        return parse_integer(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _panel(config: type[Any]) -> str:
    """The heading of a dataclass's options: ``Engine options``."""
    name = config.__name__.removesuffix("Config").removesuffix("Options")
    first, *words = re.findall("[A-Z]+(?![a-z])|[A-Z][a-z]*", name)
    return " ".join([first, *map(str.lower, words), "options"])


def _parameter(
    name: str, kind: Any, default: Any, text: str, *spellings: str, **settings: Any
) -> inspect.Parameter:
    """An option; ``settings`` are those of ``typer.Option``."""
    flags = [f"--{name.replace('_', '-')}", *spellings] if spellings else []
    if kind in (int, int | None):
        settings |= {"parser": _integer, "metavar": "<int>"}
    option = typer.Option(*flags, help=text, **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )

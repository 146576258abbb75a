"""Command-line options made from the dataclasses that define them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import typer

from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.types.sampling_params import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])

#: Sampling parameters that the command line offers.
SAMPLING_HELP: Mapping[str, str] = {
    "max_tokens": "longest output, in tokens",
    "min_tokens": "no stop before so many tokens",
    "temperature": "0 takes the most likely token",
    "top_k": "keep the k most likely tokens; 0 keeps all",
    "top_p": "keep the smallest set with this probability",
    "min_p": "keep tokens at least this fraction as likely as the best",
    "presence_penalty": "lower every token that is out already",
    "frequency_penalty": "lower tokens by how often they are out",
    "repetition_penalty": "divide the logits of tokens seen so far",
    "seed": "names the noise: the same seed, the same text",
    "stop": "end before this text; may be repeated",
    "ignore_eos": "go on after the end-of-text token",
}
#: A reader at a terminal wants more than the 16 tokens that programs get by default.
MAX_TOKENS = 256
#: Fields of EngineConfig that commands name themselves or that serve many requests.
_NOT_OPTIONS = ("model", "skip_tokenizer_init", "seed")


def with_options(*groups: list[inspect.Parameter]) -> Callable[[Function], Function]:
    """Give a command with ``**options`` the parameters of the groups in their place."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        generated = [parameter for group in groups for parameter in group]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *generated]
        )
        return function

    return decorate


def engine_options(**defaults: Any) -> list[inspect.Parameter]:
    """One option per field of ``EngineConfig``; those left out keep its defaults.

    Args:
        defaults: what a command has in place of them.
    """
    return options_of(EngineConfig, _NOT_OPTIONS, **defaults)


def options_of(
    config: type[Any], leave_out: Sequence[str] = (), **defaults: Any
) -> list[inspect.Parameter]:
    """One option per field of a dataclass whose fields are made by ``config.option``.

    Args:
        config: the dataclass.
        leave_out: fields that are no options.
        defaults: what a command has in place of the dataclass's own.
    """
    hints = typing.get_type_hints(config)
    parameters = []
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        kind, default = hints[field.name], defaults.get(field.name, field.default)
        if kind == (SpeculativeConfig | None):
            kind = str | None
        if kind == tuple[str, ...]:
            kind, default = list[str], list(default)
        parameters.append(_parameter(field.name, kind, default, field.metadata["help"]))
    return parameters


def sampling_options() -> list[inspect.Parameter]:
    """Options for sampling; where none is given the model's recommendation holds."""
    hints = typing.get_type_hints(SamplingParams)
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    parameters = []
    for name, text in SAMPLING_HELP.items():
        kind = list[str] if name == "stop" else hints[name]
        if name == "max_tokens":
            parameters.append(_parameter(name, int, MAX_TOKENS, text))
            continue
        has_default = isinstance(defaults[name], float | int) and kind is not bool
        shown = f" [default: {defaults[name]}]" if has_default else ""
        parameters.append(_parameter(name, kind | None, None, text + shown))
    return parameters


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a command was given, as options of the engine and of sampling."""
    sampling = {
        name: value
        for name, value in options.items()
        if name in SAMPLING_HELP and value not in (None, [])
    }
    engine = {name: value for name, value in options.items() if name not in SAMPLING_HELP}
    return engine, sampling


def sampling_params(recommended: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """The model's recommendation with what the user gave in its place.

    Raises:
        RequestError: a value is out of range or two contradict each other.
    """
    return replace(recommended, **given)


def _parameter(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(help=text)],
    )

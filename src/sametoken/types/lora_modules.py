"""LoRA adapters as users name them: each has a name, by which requests choose it, and a path."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sametoken.errors import ConfigError, RequestError, shown
from sametoken.types.option_values import choice

_REMEDY = "give NAME=PATH, as in sql=./sql-adapter"
_CHOICE = "give the name of an adapter, or a LoRARequest"
#: The number of requests without an adapter.
NO_ADAPTER = 0


class LoRAModule(NamedTuple):
    """An adapter.

    Attributes:
        name: by which requests choose it.
        path: its directory or hub id.
    """

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A request's choice of an adapter, with vLLM's fields.

    Attributes:
        lora_name: the adapter's name in ``lora_modules``.
        lora_int_id: vLLM's number of it; the name alone counts here.
        lora_path: where the adapter was loaded from; an empty one is not compared.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class NamesAdapter(Protocol):
    """Any object that names an adapter as ``LoRARequest`` does; its path need not be there."""

    @property
    def lora_name(self) -> str:
        """The adapter's name."""
        ...


#: The name of an adapter, an object with it, or None for the model itself.
AdapterChoice = str | NamesAdapter | None


def parse_modules(given: Any) -> tuple[LoRAModule, ...]:
    """The adapters of ``lora_modules``.

    Args:
        given: paths by name; or texts ``NAME=PATH``, or objects of ``name`` and ``path`` as JSON
            text or mappings.

    Raises:
        ConfigError: one has another form, or two have one name.
    """
    if isinstance(given, Mapping):
        found = [_module(given, name, path) for name, path in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = [_parse(one) for one in given]
    else:
        raise ConfigError(f"lora_modules={shown(given)} is of the wrong type", _REMEDY)
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"lora_modules has {shown(twice)} twice", "give each its own name")
    return tuple(found)


def adapter_number(modules: Sequence[LoRAModule], chosen: AdapterChoice) -> int:
    """The number by which a request's rows choose an adapter; ``NO_ADAPTER`` for None.

    Raises:
        RequestError: it names no adapter, or one that was loaded from another path.
    """
    if chosen is None:
        return NO_ADAPTER
    name, path = getattr(chosen, "lora_name", chosen), getattr(chosen, "lora_path", "")
    if not isinstance(name, str):
        raise _refusal(f"lora_request={shown(chosen)} is not possible", _CHOICE)
    names = [one.name for one in modules]
    if name not in names:
        remedy = choice(name, names) if names else "start the engine with lora_modules"
        raise _refusal(f"there is no adapter {shown(name)}", remedy)
    number = names.index(name)
    loaded = modules[number].path
    if path and not _is_same(path, loaded):
        raise _refusal(
            f"the adapter {shown(name)} was loaded from {shown(loaded)}, not from {shown(path)}",
            "give that path, or the name alone",
        )
    return 1 + number


def adapter_numbers(
    modules: Sequence[LoRAModule],
    chosen: AdapterChoice | Sequence[AdapterChoice],
    num_prompts: int,
) -> list[int]:
    """``adapter_number`` for each prompt.

    Args:
        modules: the adapters.
        chosen: one choice for all prompts, or one per prompt.
        num_prompts: how many there are.

    Raises:
        RequestError: as there, or the choices are not as many as the prompts.
    """
    if isinstance(chosen, str) or not isinstance(chosen, Sequence):
        return [adapter_number(modules, chosen)] * num_prompts
    if len(chosen) != num_prompts:
        raise _refusal(
            f"{len(chosen)} adapters were given for {num_prompts} prompts",
            "give one for all, or one per prompt, None for the model itself",
        )
    return [adapter_number(modules, one) for one in chosen]


def _refusal(cause: str, remedy: str) -> RequestError:
    return RequestError(cause, remedy, param="lora_request")


def _is_same(given: Any, loaded: str) -> bool:
    """Whether two paths, or hub ids, name the same adapter."""
    paths = given, loaded
    try:
        return os.fspath(given) == loaded or os.path.samefile(*map(os.path.expanduser, paths))
    except (OSError, TypeError, ValueError):
        # No path, or none of a file that is there.
        return False


def _parse(given: Any) -> LoRAModule:
    if isinstance(given, LoRAModule):
        return given
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"lora_modules={shown(given)} is not JSON", _REMEDY) from error
    if isinstance(given, Mapping):
        return _module(given, given.get("name"), given.get("path"))
    name, _, path = given.partition("=") if isinstance(given, str) else ("", "", "")
    return _module(given, name, path)


def _module(given: object, name: object, path: object) -> LoRAModule:
    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not (isinstance(name, str) and isinstance(path, str) and path and _is_name(name)):
        raise ConfigError(f"lora_modules={shown(given)} is no adapter", _REMEDY)
    return LoRAModule(name, path)


def _is_name(text: str) -> bool:
    """Names go into JSON and onto terminals."""
    return bool(text) and "=" not in text and text.isprintable()

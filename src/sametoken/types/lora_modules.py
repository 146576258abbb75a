"""LoRA adapters as users name them: each has a name, by which requests choose it, and a path."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sametoken.errors import ConfigError, RequestError, shown
from sametoken.types.option_values import choice

_REMEDY = "give NAME=PATH, as in sql=./sql-adapter"
_CHOICE = "give the name of an adapter, or a LoRARequest"
_MEMORY = "a trainer's memory"
#: The number of requests without an adapter.
NO_ADAPTER = 0


class LoRAModule(NamedTuple):
    """An adapter.

    Attributes:
        name: by which requests choose it.
        path: its directory or hub id; empty if it came from a trainer's memory.
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


class AdapterNames:
    """The adapters that requests may choose.

    Args:
        modules: those of the engine's start.

    Attributes:
        num_restarts: how often the engine has started again.
    """

    def __init__(self, modules: Sequence[LoRAModule]) -> None:
        self.num_restarts = 0
        self._given = tuple(modules)
        # By name, the oldest first.
        self._there = {one.name: one for one in modules}
        self._brought: set[str] = set()

    def restart(self) -> None:
        """The engine starts again, with the adapters of its start."""
        self.num_restarts += 1
        self._there = {one.name: one for one in self._given}

    @property
    def modules(self) -> tuple[LoRAModule, ...]:
        """All that are there."""
        return tuple(self._there.values())

    @property
    def brought(self) -> tuple[str, ...]:
        """The names of those that requests brought, the oldest first."""
        return tuple(name for name in self._there if name in self._brought)

    def find(self, name: str) -> LoRAModule | None:
        """The adapter of this name, if it is there."""
        return self._there.get(name)

    def add(self, module: LoRAModule, *, brought: bool = False) -> None:
        """Requests may choose an adapter, in place of one with its name; one of them brought it."""
        self.remove(module.name)
        # Others read it meanwhile.
        self._there = self._there | {module.name: module}
        if brought:
            self._brought.add(module.name)

    def remove(self, name: str) -> None:
        """Requests may not choose an adapter any more."""
        self._there = {one: module for one, module in self._there.items() if one != name}
        self._brought.discard(name)

    def name(self, chosen: AdapterChoice) -> str | None:
        """The name of the adapter that a request chooses; None for the model itself.

        Raises:
            RequestError: it names no adapter, or one that was loaded from another path.
        """
        if chosen is None:
            return None
        name, path = named_by(chosen)
        module = self.find(name)
        if module is None:
            raise no_adapter(name, self._there)
        if path and not _is_same(path, module.path):
            raise _refusal(
                f"the adapter {shown(name)} was loaded from "
                f"{shown(module.path) if module.path else _MEMORY}, not from {shown(path)}",
                "give that path, or the name alone",
            )
        return name


def no_adapter(name: str, there: Iterable[str]) -> RequestError:
    """The refusal of a name that is not there, among those that are."""
    names = list(there)
    remedy = choice(name, names) if names else "start the engine with lora_modules"
    return _refusal(f"there is no adapter {shown(name)}", remedy)


def require_adapter(modules: Sequence[LoRAModule], chosen: AdapterChoice) -> None:
    """Refuse a choice that is not among the adapters of a start; errors as ``AdapterNames``."""
    AdapterNames(modules).name(chosen)


def named_by(chosen: str | NamesAdapter) -> tuple[str, Any]:
    """The name of the adapter that a choice names, and the path that comes with it, if any does.

    Raises:
        RequestError: it names none.
    """
    name = getattr(chosen, "lora_name", chosen)
    if not isinstance(name, str):
        raise _refusal(f"lora_request={shown(chosen)} is not possible", _CHOICE)
    return name, getattr(chosen, "lora_path", "")


def choices_of(
    chosen: AdapterChoice | Sequence[AdapterChoice], num_prompts: int
) -> Sequence[AdapterChoice]:
    """A choice for each prompt, of one for all or one per prompt.

    Raises:
        RequestError: the choices are not as many as the prompts.
    """
    if isinstance(chosen, str) or not isinstance(chosen, Sequence):
        return [chosen] * num_prompts
    if len(chosen) != num_prompts:
        raise _refusal(
            f"{len(chosen)} adapters were given for {num_prompts} prompts",
            "give one for all, or one per prompt, None for the model itself",
        )
    return chosen


def module_of(name: object, path: object, *, sent: bool = False) -> LoRAModule:
    """An adapter of this name, given while the engine runs.

    Args:
        name: by which requests choose it.
        path: its directory or hub id; None if its tensors are given.
        sent: whether they are.

    Raises:
        RequestError: one of them is impossible, or not one of both is given.
    """
    if sent == (path is not None):
        raise RequestError(
            f"the adapter {shown(name)} has "
            f"{'both a path and' if sent else 'neither a path nor'} tensors",
            "give a path, or tensors with their config",
            param="lora_path",
        )
    module = _made(name, "" if sent else path, sent=sent)
    if module is None:
        raise RequestError(
            f"{shown(name)} at {shown(path)} is no adapter",
            "give a printable name without =, and a path",
            param="lora_name",
        )
    return module


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
    module = _made(name, path)
    if module is None:
        raise ConfigError(f"lora_modules={shown(given)} is no adapter", _REMEDY)
    return module


def _made(name: object, path: object, *, sent: bool = False) -> LoRAModule | None:
    """The adapter; None if its name or path is none. What is sent has an empty path."""
    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not (isinstance(name, str) and _is_name(name) and isinstance(path, str)):
        return None
    return LoRAModule(name, path) if path or sent else None


def _is_name(text: str) -> bool:
    """Names go into JSON and onto terminals."""
    return bool(text) and "=" not in text and text.isprintable()

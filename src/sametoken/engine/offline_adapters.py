"""The LoRA adapters of an ``LLM``, as its user sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from sametoken.engine.core import EngineCore
from sametoken.types.lora_modules import (
    NO_ADAPTER,
    AdapterChoice,
    AdapterNames,
    LoRAModule,
    choices_of,
    module_of,
    named_by,
)


@dataclass(frozen=True, slots=True)
class OfflineAdapters:
    """Adapters that requests may choose; with ``enable_lora`` they come and go.

    Attributes:
        engine: of the ``LLM``.
        named: their names and numbers.
        updating: held from reading to writing.
        resting: a block between two steps of the engine.
    """

    engine: EngineCore
    named: AdapterNames
    updating: threading.Lock
    resting: Callable[[], AbstractContextManager[object]]

    @property
    def names(self) -> tuple[str, ...]:
        """By which requests choose them."""
        return tuple(one.name for one in self.named.modules)

    def load(self, name: str, path: str | Path) -> None:
        """Read an adapter in PEFT's format, in place of one of its name; running requests go on.

        Args:
            name: by which requests choose it.
            path: its directory or hub id.

        Raises:
            RequestError: it cannot be read, does not fit the model, or there is no room for it.
            EngineDeadError: the engine failed.
        """
        with self.updating:
            self._load(module_of(name, path))

    def unload(self, name: str) -> None:
        """No further request has the adapter; unknown names are ignored."""
        with self.updating, self.resting():
            self.engine.upkeep.remove_adapter(self.named.number_of(name))
            self.named.remove(name)

    def numbers(
        self, chosen: AdapterChoice | Sequence[AdapterChoice], num_prompts: int
    ) -> list[int]:
        """The number of each prompt's adapter; one that comes with a path is read if need be.

        If there is no room, the oldest that came so goes, of those that no request has or chooses.

        Raises:
            RequestError: as ``choices_of``, ``named_by``, ``AdapterNames.number`` and ``load``.
        """
        choices = choices_of(chosen, num_prompts)
        wanted = dict(named_by(one) for one in choices if one is not None)
        for name, path in wanted.items():
            if path and self.engine.adapters.come:
                self._bring(name, path, wanted)
        return [self.named.number(one) for one in choices]

    def _bring(self, name: str, path: str, wanted: Collection[str]) -> None:
        if self.named.find(name) is None:
            with self.updating:
                # Another thread may have brought it.
                if self.named.find(name) is None:
                    self._load(module_of(name, path), wanted)

    def _load(self, module: LoRAModule, wanted: Collection[str] | None = None) -> None:
        """Load an adapter; by ``wanted``, names that are to be there too, a request brings it."""
        number, replaced = self.named.next_number(), self.named.number_of(module.name)
        new = self.engine.adapters.load(number, module.path, replaced)
        with self.resting():
            if wanted is not None:
                self._make_room(wanted)
            self.engine.upkeep.use_adapter(new)
            self.named.add(module, number, brought=wanted is not None)

    def _make_room(self, wanted: Collection[str]) -> None:
        """Let go the oldest adapter that requests brought and none of them has, if need be."""
        in_use = self.engine.scheduler.adapters_in_use
        if self.engine.adapters.places(NO_ADAPTER, in_use):
            return
        for name in self.named.brought:
            number = self.named.number_of(name)
            if name not in wanted and number not in in_use:
                self.engine.upkeep.remove_adapter(number)
                self.named.remove(name)
                return

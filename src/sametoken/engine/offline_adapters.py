"""The LoRA adapters of an ``LLM``, as its user sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sametoken.engine.core import EngineCore
from sametoken.engine.live_adapters import adapter_errors
from sametoken.engine.upkeep import used_or_dropped
from sametoken.models.load.adapter import StoredAdapter, sent_adapter
from sametoken.types.lora_modules import (
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
        named: their names.
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

    def load(
        self,
        name: str,
        path: str | Path | None = None,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Read an adapter in PEFT's format, in place of one of its name; running requests go on.

        Args:
            name: by which requests choose it.
            path: its directory or hub id; or instead of one:
            tensors: as ``get_peft_model_state_dict`` returns them, on any device; they are copied.
            config: as ``LoraConfig.to_dict`` returns it.

        Raises:
            RequestError: it cannot be read, does not fit the model, or there is no room for it.
            EngineDeadError: the engine failed.
        """
        sent = not (tensors is None and config is None)
        module = module_of(name, path, sent=sent)
        with adapter_errors():
            stored = sent_adapter(tensors, config) if sent else None
        with self.updating:
            self._load(module, stored)

    def unload(self, name: str) -> None:
        """No further request has the adapter; unknown names are ignored."""
        with self.updating, self.resting():
            self._remove(name)

    def chosen(
        self, chosen: AdapterChoice | Sequence[AdapterChoice], num_prompts: int
    ) -> list[str | None]:
        """The name of each prompt's adapter; one that comes with a path is read if need be.

        If there is no room, the oldest that came so goes, of those that no request has or chooses.

        Raises:
            RequestError: as ``choices_of``, ``named_by``, ``AdapterNames.name`` and ``load``.
        """
        choices = choices_of(chosen, num_prompts)
        wanted = dict(named_by(one) for one in choices if one is not None)
        for name, path in wanted.items():
            if path and self.engine.adapters.come:
                self._bring(name, path, wanted)
        return [self.named.name(one) for one in choices]

    def _bring(self, name: str, path: str, wanted: Collection[str]) -> None:
        if self.named.find(name) is None:
            with self.updating:
                # Another thread may have brought it.
                if self.named.find(name) is None:
                    self._load(module_of(name, path), wanted=wanted)

    def _load(
        self,
        module: LoRAModule,
        stored: StoredAdapter | None = None,
        wanted: Collection[str] | None = None,
    ) -> None:
        """Load an adapter; by ``wanted``, names that are to be there too, a request brings it."""
        new = self.engine.adapters.load(module.name, stored or module.path)
        with used_or_dropped(new), self.resting():
            if wanted is not None:
                self._make_room(module.name, wanted)
            self.engine.upkeep.use_adapter(new)
            self.named.add(module, brought=wanted is not None)

    def _make_room(self, name: str, wanted: Collection[str]) -> None:
        """Let go the oldest adapter that requests brought and none of them has, if need be."""
        adapters, in_use = self.engine.adapters, self.engine.scheduler.adapters_in_use
        if adapters.place(name, in_use) is None:
            for one in self.named.brought:
                if one not in wanted and adapters.number(one) not in in_use:
                    self._remove(one)
                    return

    def _remove(self, name: str) -> None:
        self.engine.upkeep.remove_adapter(name)
        self.named.remove(name)

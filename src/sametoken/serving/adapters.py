"""The LoRA adapters of an ``AsyncLLM``: they come and go while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from sametoken.errors import RequestError, shown
from sametoken.serving.messages import Command, LoadAdapter, RemoveAdapter
from sametoken.types.lora_modules import AdapterNames, LoRAModule, module_of


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """The adapters that requests may choose. An engine that restarts has those of its start.

    Attributes:
        named: their names and numbers.
        command: has the engine carry out a command.
    """

    named: AdapterNames
    command: Callable[[Command], Awaitable[int]]
    _one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)
    _loading: set[asyncio.Future[None]] = field(default_factory=set)

    @property
    def modules(self) -> tuple[LoRAModule, ...]:
        """All of them."""
        return self.named.modules

    async def load(self, name: str, path: str | Path, *, in_place: bool = True) -> None:
        """Read an adapter in PEFT's format, in place of one of its name; requests go on.

        Args:
            name: by which requests choose it.
            path: its directory or hub id, as the engine process finds it.
            in_place: whether one of its name may be there.

        Raises:
            RequestError: it is there, cannot be read, does not fit the model, or has no room.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        module = module_of(name, path)
        async with self._one_by_one:
            if not in_place and self.named.find(name) is not None:
                raise RequestError(
                    f"the adapter {shown(name)} is there already",
                    "unload it first, or set load_inplace",
                    param="lora_name",
                )
            # A caller that goes away leaves no adapter half loaded.
            loading = asyncio.ensure_future(self._load(module))
            self._loading.add(loading)
            loading.add_done_callback(self._loaded)
            await asyncio.shield(loading)

    async def unload(self, name: str) -> None:
        """No further request has the adapter; unfinished ones keep it until they end.

        Raises:
            RequestError: there is none of that name.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        async with self._one_by_one:
            number = self.named.number(name)
            self.named.remove(name)
            await self.command(RemoveAdapter(number))

    async def _load(self, module: LoRAModule) -> None:
        number, replaced = self.named.next_number(), self.named.number_of(module.name)
        await self.command(LoadAdapter(number, module.path, replaced))
        self.named.add(module, number)

    def _loaded(self, loading: asyncio.Future[None]) -> None:
        self._loading.discard(loading)
        # Seen, if nobody waits for it any more.
        loading.exception()

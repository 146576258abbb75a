"""The LoRA adapters of an ``AsyncLLM``: they come and go while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    _changing: set[asyncio.Future[None]] = field(default_factory=set)

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
        await self._change(self._load, module_of(name, path), in_place)

    async def unload(self, name: str) -> None:
        """No further request has the adapter; unfinished ones keep it until they end.

        Raises:
            RequestError: there is none of that name.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        await self._change(self._unload, name)

    async def _change(self, change: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        """Let a change come to its end, before the next one and though its caller goes away."""
        await self._one_by_one.acquire()
        changing = asyncio.ensure_future(change(*given))
        self._changing.add(changing)
        changing.add_done_callback(self._changed)
        await asyncio.shield(changing)

    async def _load(self, module: LoRAModule, in_place: bool) -> None:
        if not in_place and self.named.find(module.name) is not None:
            raise RequestError(
                f"the adapter {shown(module.name)} is there already",
                "unload it first, or set load_inplace",
                param="lora_name",
            )
        number, replaced = self.named.next_number(), self.named.number_of(module.name)
        await self.command(LoadAdapter(number, module.path, replaced))
        self.named.add(module, number)

    async def _unload(self, name: str) -> None:
        await self.command(RemoveAdapter(self.named.number(name)))
        self.named.remove(name)

    def _changed(self, changing: asyncio.Future[None]) -> None:
        self._changing.discard(changing)
        self._one_by_one.release()
        # Seen, if nobody waits for it any more.
        changing.exception()

"""The LoRA adapters of an ``AsyncLLM``: they come and go while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.errors import RequestError, shown
from sametoken.serving.messages import (
    ComingAdapter,
    Command,
    FinishAdapter,
    LoadAdapter,
    RemoveAdapter,
    StartUpdate,
)
from sametoken.types.lora_modules import AdapterNames, LoRAModule, module_of

if TYPE_CHECKING:
    from torch import Tensor

    from sametoken.distributed.host_memory import HostMemory
    from sametoken.engine.shared_weights import SharedAdapter

    _Sent = tuple[Mapping[str, Tensor] | None, Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """The adapters that requests may choose. An engine that restarts has those of its start.

    Attributes:
        named: their names.
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

    async def load(
        self,
        name: str,
        path: str | Path | None = None,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        config: Mapping[str, Any] | None = None,
        in_place: bool = True,
    ) -> None:
        """Read an adapter in PEFT's format, in place of one of its name; requests go on.

        Args:
            name: by which requests choose it.
            path: its directory or hub id, as the engine process finds it; or instead of one:
            tensors, config: as in ``LLM.adapters``; the engine process reads a copy in memory.
            in_place: whether one of its name may be there.

        Raises:
            RequestError: it is there, cannot be read, does not fit the model, or has no room.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        sent = None if tensors is None and config is None else (tensors, config)
        module = module_of(name, path, sent=sent is not None)
        await self._change(self._load, module, sent, in_place)

    async def start_update(self, name: str, config: Mapping[str, Any]) -> None:
        """Begin an update whose tensors a trainer sends, by ``AsyncLLM.take_weights``.

        Args:
            name: by which requests will choose the adapter.
            config: as in ``load``, as plain JSON.

        Raises:
            RequestError: the name or the config is impossible, or no adapter can come.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        module = module_of(name, None, sent=True)
        await self.command(StartUpdate(ComingAdapter(module.name, config)))

    async def finish_update(self, name: str) -> None:
        """Use the adapter whose tensors came; as ``load``.

        Raises:
            WeightUpdateError: the update that has begun is another one.
        """
        await self._change(self._finish, module_of(name, None, sent=True))

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

    async def _load(self, module: LoRAModule, sent: _Sent | None, in_place: bool) -> None:
        if not in_place and self.named.find(module.name) is not None:
            raise RequestError(
                f"the adapter {shown(module.name)} is there already",
                "unload it first, or set load_inplace",
                param="lora_name",
            )
        use = partial(self.named.add, module)
        if sent is None:
            await self._carry_out(LoadAdapter(module.name, module.path), use)
        else:
            # Kept until it was read.
            _memory, shared = await asyncio.to_thread(_in_memory, *sent)
            await self._carry_out(LoadAdapter(module.name, shared), use)

    async def _finish(self, module: LoRAModule) -> None:
        await self._carry_out(FinishAdapter(module.name), partial(self.named.add, module))

    async def _unload(self, name: str) -> None:
        self.named.name(name)
        await self._carry_out(RemoveAdapter(name), partial(self.named.remove, name))

    async def _carry_out(self, command: Command, change: Callable[[], None]) -> None:
        """Change the engine's adapters, and the names with them."""
        num_restarts = self.named.num_restarts
        await self.command(command)
        # An engine that died since it answered has those of its start.
        if num_restarts == self.named.num_restarts:
            change()

    def _changed(self, changing: asyncio.Future[None]) -> None:
        self._changing.discard(changing)
        self._one_by_one.release()
        # Seen, if nobody waits for it any more.
        changing.exception()


def _in_memory(
    tensors: Mapping[str, Tensor] | None, config: Mapping[str, Any] | None
) -> tuple[HostMemory, SharedAdapter]:
    # This process loads no tensors but those that are given to it.
    from sametoken.engine.live_adapters import adapter_errors
    from sametoken.engine.shared_weights import adapter_in_memory
    from sametoken.models.load.adapter import sent_adapter

    with adapter_errors():
        return adapter_in_memory(sent_adapter(tensors, config))

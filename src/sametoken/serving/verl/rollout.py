"""The trainer's side of verl's rollout: it sends weights, by files in shared memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import save_file
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from sametoken.errors import UnsupportedError
from sametoken.models.load.adapter import config_text
from sametoken.models.load.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from sametoken.serving.verl.plugin import NAME

#: Bytes of a file, so that a trainer's rank holds few tensors on the host at once.
_FILE_BYTES = 2**30
_SHARED_MEMORY = "/dev/shm"


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """See ``BaseRollout``: the client of the server that ``Replica`` starts on the same node."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        # Replicas have one rank each.
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """End the sleep of weights or KV."""
        if self.config.free_cache_engine:
            await self._server().wake_up.remote(tags)

    async def release(self) -> None:
        """Give the memory of weights and KV back."""
        if self.config.free_cache_engine:
            await self._server().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **more: Any,
    ) -> None:
        """Replace all weights of the server, or its adapter.

        Args:
            weights: names and tensors, plain or asynchronous: of the whole checkpoint, or of an
                adapter in PEFT's format.
            global_steps: the trainer's step.
            wire_format: "named_tensors".
            more: ``peft_config``, the config of an adapter that is not merged; and
                ``base_sync_done``, whether its tensors come, and not those of its model.

        Raises:
            UnsupportedError: they come as differences.
            WeightUpdateError, RequestError: the engine refuses them.
        """
        if wire_format != "named_tensors":
            raise UnsupportedError("differences of weights are not taken", "send named_tensors")
        peft_config = more.get("peft_config") if more.get("base_sync_done") else None
        parent = _SHARED_MEMORY if Path(_SHARED_MEMORY).is_dir() else None
        with tempfile.TemporaryDirectory(prefix=f"{NAME}-", dir=parent) as directory:
            if peft_config is None:
                await _write(weights, Path(directory))
                await self._server().update_weights.remote(directory, global_steps)
            else:
                await _write_adapter(weights, peft_config, Path(directory))
                await self._server().update_adapter.remote(directory, global_steps)

    def _server(self) -> Any:
        # It starts after the trainer's workers.
        return ray.get_actor(f"{NAME}_server_{self.replica_rank}")


async def _write(weights: Any, directory: Path) -> None:
    held: dict[str, Tensor] = {}
    count = num_bytes = 0
    async for name, tensor in ensure_async_iterator(weights):
        # verl names the weights of a model under an adapter as vLLM's layers do.
        held[name.replace(".base_layer.", ".")] = _copy(tensor)
        num_bytes += tensor.nbytes
        if num_bytes >= _FILE_BYTES:
            save_file(held, directory / f"part-{count}.safetensors")
            held, count, num_bytes = {}, count + 1, 0
    if held:
        save_file(held, directory / f"part-{count}.safetensors")


async def _write_adapter(weights: Any, peft_config: Mapping[str, Any], directory: Path) -> None:
    """Write an adapter as PEFT saves it, in one file."""
    held = {name: _copy(tensor) async for name, tensor in ensure_async_iterator(weights)}
    save_file(held, directory / ADAPTER_WEIGHTS[0])
    (directory / ADAPTER_CONFIG).write_text(config_text(peft_config))


def _copy(tensor: Tensor) -> Tensor:
    """What a trainer gathers may be in memory that it uses again, or shared."""
    return tensor.detach().to("cpu", copy=True).contiguous()

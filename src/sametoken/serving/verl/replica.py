"""A replica of verl's rollout: one server as a Ray actor, on the node of its worker."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from sametoken.errors import UnsupportedError
from sametoken.serving.verl.plugin import NAME
from sametoken.serving.verl.server import (
    RolloutServer,
    engine_config,
    lora_rank_of,
    request_defaults,
)


class Server(RolloutServer):
    """A ``RolloutServer`` whose answers are verl's."""

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **more: Any
    ) -> TokenOutput:
        """Complete a prompt.

        Raises:
            UnsupportedError: there are images, or another argument that is not honoured.
        """
        given = [name for name, value in more.items() if value]
        if given:
            raise UnsupportedError(f"a rollout has {', '.join(given)}", "leave it out")
        return TokenOutput(**await self.answer(prompt_ids, sampling_params, request_id))

    async def start_profile(self, **_: Any) -> None:
        """Nothing is profiled."""

    async def stop_profile(self) -> None:
        """Nothing is profiled."""


class Replica(RolloutReplica):  # type: ignore[misc]
    """See ``RolloutReplica``; of one rank, whose weights can change.

    Raises:
        UnsupportedError: it would have several ranks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.world_size != 1:
            raise UnsupportedError(
                f"a replica of {self.world_size} ranks cannot change its weights",
                "set the parallel sizes of the rollout to 1, and use more replicas",
            )

    async def launch_servers(self) -> None:
        """Start the server beside the replica's worker, with its GPU."""
        node_id, devices = await self.workers[0].__ray_call__.remote(_place)
        model = omega_conf_to_dataclass(self.model_config, dataclass_type=HFModelConfig)
        path = model.local_path or model.path
        config = engine_config(self.config, path, lora_rank_of(model), self.replica_rank)
        environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        server = (
            ray.remote(Server)
            .options(
                name=self._name(),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": environment},
                max_concurrency=self.max_concurrency,
            )
            .remote(
                config,
                ray.util.get_node_ip_address().strip("[]"),
                self.rollout_mode.value,
                (self.config.prompt_length, self.config.response_length),
                sleeps=self.config.free_cache_engine,
                defaults=request_defaults(self.config),
                seeded_by_id=self.config.full_determinism,
            )
        )
        await server.launch_server.remote()
        self.servers, self._server_handle = [server], server
        host, port = await server.get_server_address.remote()
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _name(self) -> str:
        kinds = {"reward_": self.is_reward_model, "teacher_": self.is_teacher_model}
        kind = next((kind for kind, holds in kinds.items() if holds), "")
        return f"{NAME}_server_{kind}{self.replica_rank}{self.name_suffix}"


def _place(worker: Any) -> tuple[str, str | None]:
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")

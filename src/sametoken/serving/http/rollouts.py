"""Requests of trainers, with vLLM's paths and fields: pauses, sleep, new weights and their version.

They are answered if ``weight_transfer_config`` is set (docs/rollouts.md).
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from sametoken.errors import CheckpointError, shown
from sametoken.serving.http.body import JsonRoute
from sametoken.serving.http.errors import ApiError, invalid
from sametoken.serving.http.ipc_handles import read_handles
from sametoken.serving.http.response_schemas import ErrorResponse
from sametoken.serving.http.rollout_schemas import (
    FinishLoRARequest,
    FinishRequest,
    InitInfo,
    InitRequest,
    IsPaused,
    IsSleeping,
    LoRAInfo,
    Message,
    ModelInfo,
    NameRequest,
    NewVersion,
    Nothing,
    ParallelInfo,
    PauseStatus,
    Reset,
    ServerInfo,
    Settings,
    StartLoRARequest,
    StartRequest,
    TransferInfo,
    UpdateInfo,
    UpdateRequest,
    WeightInfo,
    WorldSize,
)
from sametoken.serving.http.transfer_config import FILES, WeightTransferConfig
from sametoken.serving.messages import JoinedTensors, SharedTensors, TensorForm
from sametoken.types.weight_updates import DRAFTER, IPC, MODEL, NCCL, NCCL_ID_BYTES, Rendezvous

if TYPE_CHECKING:
    from sametoken.serving.async_llm import AsyncLLM
    from sametoken.serving.http.served import Served

_COLUMNS = "names, dtype_names and shapes"
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "What is sent or asked for does not fit"},
    401: {"model": ErrorResponse, "description": "The API key is missing or wrong"},
    403: {"model": ErrorResponse, "description": "A page of another site sent the request"},
    503: {"model": ErrorResponse, "description": "Requests are not accepted now"},
}


def rollout_routes(served: Served, config: WeightTransferConfig) -> APIRouter:
    """The routes of pauses, sleep and updates, by a config of how weights come."""
    engine, router = served.engine, control_router(served)
    _add_pauses(router, engine)
    _add_sleep(router, engine)
    _add_updates(router, engine, config)
    _add_adapters(router, served, config)
    _add_versions(router, engine)
    _add_server_info(router, engine, config)
    return router


def control_router(served: Served, prefix: str = "") -> APIRouter:
    """A router of requests that change what answers; without a key, pages may send none."""
    dependencies = [] if served.config.api_key else [Depends(_require_no_page)]
    return APIRouter(
        prefix=prefix, responses=_ERRORS, route_class=JsonRoute, dependencies=dependencies
    )


def _add_pauses(router: APIRouter, engine: AsyncLLM) -> None:
    @router.post("/pause")
    async def pause(
        mode: Literal["abort", "wait", "keep"] = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: Annotated[bool, Query(description="no KV of older weights is read")] = True,
    ) -> PauseStatus:
        """Stop all steps: abort unfinished requests, wait for those that run, or keep all."""
        await engine.pause("wait" if wait_for_inflight_requests else mode)
        return PauseStatus(status="paused")

    @router.post("/resume")
    async def resume() -> PauseStatus:
        """Step again."""
        await engine.resume()
        return PauseStatus(status="resumed")

    @router.get("/is_paused")
    async def is_paused() -> IsPaused:
        """Whether a pause holds."""
        return IsPaused(is_paused=engine.is_paused)


def _add_sleep(router: APIRouter, engine: AsyncLLM) -> None:
    @router.post("/sleep")
    async def sleep(
        level: Literal["1", "2"] = "1", mode: Literal["abort", "wait"] = "abort"
    ) -> Message:
        """Pause, and give back KV, at level 2 the model's weights too."""
        await engine.sleep(int(level), mode)
        return Message(message="Asleep")

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
    ) -> Message:
        """End the sleep of these parts, or of all; once all is awake, steps run."""
        await engine.wake_up(tags)
        return Message(message="Asleep in part" if engine.is_sleeping else "Awake")

    @router.get("/is_sleeping")
    async def is_sleeping() -> IsSleeping:
        """Whether the engine sleeps, in whole or in part."""
        return IsSleeping(is_sleeping=engine.is_sleeping)


def _add_updates(router: APIRouter, engine: AsyncLLM, config: WeightTransferConfig) -> None:
    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitRequest) -> Message:
        """Join the trainer's process group, which must come meanwhile, if there is one."""
        at = _rendezvous(body.init_info, config)
        if at is not None:
            await engine.join_trainer(at)
        return Message(message="Weight transfer initialized")

    @router.post("/start_weight_update")
    async def start_weight_update(
        body: StartRequest = StartRequest(),  # noqa: B008
    ) -> Message:
        """Begin an update of the model's weights; what was sent of another one is dropped."""
        await engine.start_update(MODEL)
        return Message(message="Weight update started")

    @router.post("/start_draft_weight_update")
    async def start_draft_weight_update(body: Nothing = Nothing()) -> Message:  # noqa: B008
        """Begin an update of the drafter's weights; what was sent of another one is dropped."""
        await engine.start_update(DRAFTER)
        return Message(message="Draft weight update started")

    @router.post("/update_weights")
    async def update_weights(body: UpdateRequest) -> Message:
        """Take weights, which come meanwhile; those in use stay until the update is finished."""
        await engine.take_weights(await asyncio.to_thread(_sent, body.update_info, config))
        return Message(message="Weights updated")

    @router.post("/finish_weight_update")
    async def finish_weight_update(
        body: FinishRequest = FinishRequest(),  # noqa: B008
    ) -> Message:
        """Use the weights that were sent, if all of them fit; otherwise the old ones stay."""
        try:
            await engine.finish_update(body.weight_version)
        except CheckpointError as error:
            # A directory that cannot be read is the client's, as it named it.
            raise invalid(str(error), "update_info", code="weights_refused") from error
        return Message(message="Weight update finished")


def _add_adapters(router: APIRouter, served: Served, config: WeightTransferConfig) -> None:
    """Updates of adapters, whose tensors ``/update_weights`` takes."""
    adapters = served.engine.adapters

    @router.post("/start_lora_update")
    async def start_lora_update(body: StartLoRARequest) -> Message:
        """Begin an update of an adapter; what was sent of another one is dropped."""
        require_no_model(served, body.lora_name)
        if config.backend == FILES:
            raise invalid("files of an adapter are loaded by /v1/load_lora_adapter", "lora_name")
        await adapters.start_update(body.lora_name, body.lora_config)
        return Message(message="Adapter update started")

    @router.post("/finish_lora_update")
    async def finish_lora_update(body: FinishLoRARequest) -> Message:
        """Use the adapter that was sent, in place of one of its name; requests go on."""
        await adapters.finish_update(body.lora_name)
        return Message(message="Adapter update finished")


def _add_versions(router: APIRouter, engine: AsyncLLM) -> None:
    @router.post("/update_weight_version")
    async def update_weight_version(body: NameRequest) -> NewVersion:
        """Give the weights, which stay, a larger version."""
        version = await engine.name_weights(body.new_version)
        return NewVersion(success=True, new_version=str(version))

    @router.get("/weight_info")
    async def weight_info() -> WeightInfo:
        """The version of the weights."""
        return WeightInfo(weight_version=str(engine.weight_version))

    @router.get("/get_world_size")
    async def get_world_size(
        include_dp: Annotated[bool, Query(description="one engine has no data parallelism")] = True,
    ) -> WorldSize:
        """The ranks that a trainer's group gains: one, which passes weights on to the others."""
        return WorldSize(world_size=1)


def _add_server_info(router: APIRouter, engine: AsyncLLM, config: WeightTransferConfig) -> None:
    @router.get("/server_info")
    async def server_info(config_format: Literal["json"] = "json") -> ServerInfo:
        """The settings that trainers look at."""
        resolved = engine.resolved
        room = LoRAInfo(resolved.max_loras, resolved.max_lora_rank)
        return ServerInfo(
            vllm_config=Settings(
                model_config=ModelInfo(
                    model=resolved.model,
                    dtype=f"torch.{resolved.dtype}",
                    max_model_len=resolved.max_model_len,
                    logprobs_mode=resolved.logprobs_mode,
                ),
                parallel_config=ParallelInfo(tensor_parallel_size=resolved.world_size),
                lora_config=room if room.max_loras else None,
                weight_transfer_config=TransferInfo(backend=config.backend),
            )
        )

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Reset:
        """Empty the prefix cache; updates need no reset, as no KV of other weights is read."""
        await engine.reset_prefix_cache()
        return Reset(success=True)


def require_no_model(served: Served, name: str) -> None:
    """Refuse an adapter with a name of the model: requests could not tell the two apart."""
    if name in served.names:
        raise invalid(f"{shown(name)} is a name of the model", "lora_name")


def _require_no_page(request: Request) -> None:
    """Refuse what a browser sends for a page of another site, where no key tells them apart."""
    if "origin" in request.headers:
        raise ApiError(
            403,
            "pages may not control the engine. Leave Origin out, or give the server an api_key",
            code="forbidden",
        )


def _rendezvous(info: InitInfo, config: WeightTransferConfig) -> Rendezvous | None:
    """Where to join; None for files and for memory, which are joined nowhere."""
    if config.backend in (FILES, IPC):
        # Whether tensors are joined is seen in each update.
        if info.model_fields_set - ({"packed"} if config.backend == IPC else set()):
            raise _misfit("init_info", "no fields", config)
        return None
    unique_id = _unique_id(info, config)
    if unique_id is None and (info.master_address is None or info.master_port is None):
        raise _misfit("init_info", "master_address and master_port", config)
    if info.rank_offset >= info.world_size:
        raise invalid(
            f"rank_offset={info.rank_offset} is no rank of world_size={info.world_size}. "
            "Rank 0 is the trainer's, the engines have the others",
            "init_info",
        )
    return Rendezvous(
        config.backend,
        info.master_address or "",
        info.master_port or 0,
        info.rank_offset,
        info.world_size,
        config.timeout,
        packed_bytes=info.packed_buffer_size_bytes if info.packed else 0,
        unique_id=unique_id,
    )


def _unique_id(info: InitInfo, config: WeightTransferConfig) -> bytes | None:
    """NCCL's id, if the trainer has sent it."""
    if info.nccl_unique_id_b64 is None:
        return None
    if config.backend != NCCL or info.master_address is not None or info.master_port is not None:
        raise _misfit("init_info", "master_address and master_port, or nccl an id alone", config)
    try:
        found = base64.b64decode(info.nccl_unique_id_b64, validate=True)
    except ValueError:
        found = b""
    if len(found) != NCCL_ID_BYTES:
        raise invalid(f"nccl_unique_id_b64 is not base64 of {NCCL_ID_BYTES} bytes", "init_info")
    return found


def _sent(
    info: UpdateInfo, config: WeightTransferConfig
) -> Path | tuple[TensorForm, ...] | JoinedTensors | SharedTensors:
    """The directory, or the tensors that come or are there."""
    if config.directory is not None:
        if info.path is None or info.model_dump(exclude_defaults=True).keys() != {"path"}:
            raise _misfit("update_info", "path alone", config)
        return _inside(Path(config.directory), info.path)
    forms = _forms(info, config)
    if config.backend == IPC:
        return _shared(info, forms, config)
    if info.ipc_handles_pickled is not None or info.tensor_sizes:
        raise _misfit("update_info", _COLUMNS, config)
    return JoinedTensors(forms, info.packed_buffer_size_bytes) if info.packed else forms


def _forms(info: UpdateInfo, config: WeightTransferConfig) -> tuple[TensorForm, ...]:
    names, dtypes, shapes = (column or [] for column in (info.names, info.dtype_names, info.shapes))
    if info.path is not None or not names:
        raise _misfit("update_info", _COLUMNS, config)
    if not len(names) == len(dtypes) == len(shapes):
        raise invalid(
            f"update_info has {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} "
            "shapes. Send one of each for every tensor",
            "update_info",
        )
    return tuple(
        TensorForm(name, dtype, tuple(shape))  # type: ignore[arg-type]
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    )


def _shared(
    info: UpdateInfo, forms: tuple[TensorForm, ...], config: WeightTransferConfig
) -> SharedTensors:
    """Tensors in the trainer's memory: each has handles, or a buffer of all of them has."""
    if info.ipc_handles_pickled is None:
        raise _misfit("update_info", f"{_COLUMNS}, and ipc_handles_pickled", config)
    try:
        handles = read_handles(info.ipc_handles_pickled)
    except ValueError as error:
        raise invalid(f"ipc_handles_pickled cannot be read: {error}", "update_info") from error
    sizes = tuple(info.tensor_sizes or ())
    # A tuple of handles for tensors, one for a buffer, which alone has sizes.
    of_buffer = not isinstance(handles, tuple)
    if len(sizes) != (len(forms) if of_buffer else 0):
        raise invalid(
            f"update_info has {len(sizes)} tensor_sizes. Send one for every tensor if they are in "
            "one buffer, and none otherwise",
            "update_info",
        )
    found = handles if isinstance(handles, tuple) else (handles,)
    if not of_buffer and len(found) != len(forms):
        raise invalid(
            f"update_info has {len(forms)} names and handles of {len(found)} tensors. Send one of "
            "each for every tensor",
            "update_info",
        )
    return SharedTensors(forms, found, sizes)


def _inside(directory: Path, name: str) -> Path:
    """A directory below ``directory``, wherever links lead."""
    try:
        path, root = (directory / name).resolve(), directory.resolve()
        fits = path != root and path.is_relative_to(root) and path.is_dir()
    except (OSError, RuntimeError, ValueError):
        # Too long, a loop of links, or with a NUL.
        fits = False
    if not fits:
        raise invalid(
            f"{shown(name)} names no directory below that of weight_transfer_config. "
            "Write the tensors to one, and send its name",
            "update_info",
            code="weights_refused",
        )
    return path


def _misfit(param: str, fields: str, config: WeightTransferConfig) -> ApiError:
    return invalid(f"{param} has other fields than {config.backend!r} takes. Send {fields}", param)

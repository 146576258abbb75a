"""Models of trainers' requests and their answers, with vLLM's fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from sametoken.serving.http.schemas import Count
from sametoken.serving.http.unions import Strict

_MAX_TENSORS, _MAX_DIMENSIONS, _MAX_PORT, _MAX_DIGITS = 2**16, 8, 2**16 - 1, 19


def _number(version: object) -> object:
    """The number of a version in text, as vLLM's are.

    Raises:
        ValueError: it is no whole number.
    """
    if not isinstance(version, str):
        return version
    if not (version.isascii() and version.isdecimal() and len(version) <= _MAX_DIGITS):
        raise ValueError('a version is a whole number that grows, as in "7"')
    return int(version)


def _in_format(value: bool) -> bool:
    """True.

    Raises:
        ValueError: it is false.
    """
    if not value:
        raise ValueError("tensors come as in a checkpoint; leave it out, and send them so")
    return value


Version = Annotated[
    int, BeforeValidator(_number, json_schema_input_type=int | str), Field(ge=0, lt=2**63)
]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
PackedBytes = Annotated[int, Field(ge=1, lt=2**63)]
_List = Field(max_length=_MAX_TENSORS, fail_fast=True)


class Nothing(Strict):
    """A JSON object without fields."""


class StartRequest(Strict):
    """Begin an update."""

    is_checkpoint_format: Annotated[bool, AfterValidator(_in_format)] = True


class StartLoRARequest(Strict):
    """Begin an update of an adapter: its name, and PEFT's adapter_config.json."""

    lora_name: Text
    lora_config: dict[str, Any]


class FinishLoRARequest(Strict):
    """Use the adapter of this name, whose tensors were sent."""

    lora_name: Text


class InitInfo(Strict):
    """Where the trainer's process group meets, and how it joins tensors; for files nothing.

    ``packed_num_buffers`` is the trainer's own matter.
    """

    master_address: str | None = None
    master_port: Annotated[int, Field(ge=1, le=_MAX_PORT)] | None = None
    nccl_unique_id_b64: str | None = None
    rank_offset: Annotated[Count, Field(ge=1)] = 1
    world_size: Annotated[Count, Field(ge=2)] = 2
    packed: bool = False
    packed_buffer_size_bytes: PackedBytes = 2**30
    packed_num_buffers: Annotated[Count, Field(ge=1)] = 2


class InitRequest(Strict):
    """Prepare for updates."""

    init_info: InitInfo


class UpdateInfo(Strict):
    """What the trainer sends: the name of a directory, or tensors in order.

    Those in its memory with handles, each or of a buffer that has their bytes in order. Those
    of a group may come joined in this update alone, as vLLM's trainers before 0.28 send them.
    """

    path: str | None = None
    names: Annotated[list[str], _List] | None = None
    dtype_names: Annotated[list[str], _List] | None = None
    shapes: (
        Annotated[list[Annotated[list[Count], Field(max_length=_MAX_DIMENSIONS)]], _List] | None
    ) = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], _List] | None = None
    packed: bool = False
    packed_buffer_size_bytes: PackedBytes = 2**30
    packed_num_buffers: Annotated[Count, Field(ge=1)] = 2


class UpdateRequest(Strict):
    """Take weights of an update."""

    update_info: UpdateInfo


class FinishRequest(Strict):
    """Use the weights that were sent, under a version or the next."""

    weight_version: Version | None = None


class NameRequest(Strict):
    """Give the weights another version."""

    new_version: Version


class Message(BaseModel):
    """What was done."""

    message: str


class PauseStatus(BaseModel):
    """Whether the engine steps."""

    status: Literal["paused", "resumed"]


class IsPaused(BaseModel):
    """Whether a pause holds."""

    is_paused: bool


class IsSleeping(BaseModel):
    """Whether some part sleeps."""

    is_sleeping: bool


class WeightInfo(BaseModel):
    """The version of the weights: a whole number, as text."""

    weight_version: str


class NewVersion(BaseModel):
    """The version of the weights from now on."""

    success: bool
    new_version: str


class WorldSize(BaseModel):
    """Ranks of the server in a trainer's group."""

    world_size: int


class Reset(BaseModel):
    """Whether the prefix cache is empty."""

    success: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model, with vLLM's names."""

    model: str
    dtype: str
    max_model_len: int
    logprobs_mode: str


@dataclass(frozen=True, slots=True)
class ParallelInfo:
    """Ranks, with vLLM's names; a server has one engine."""

    tensor_parallel_size: int
    data_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class LoRAInfo:
    """For which adapters there is room, with vLLM's names."""

    max_loras: int
    max_lora_rank: int


@dataclass(frozen=True, slots=True)
class TransferInfo:
    """How weights come."""

    backend: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What trainers read of vLLM's settings. A dataclass, as pydantic keeps ``model_config``."""

    model_config: ModelInfo
    parallel_config: ParallelInfo
    lora_config: LoRAInfo | None
    weight_transfer_config: TransferInfo


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's settings."""

    vllm_config: Settings

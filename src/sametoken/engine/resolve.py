"""Resolve the user's options to the engine's settings, with reasons, and plan its memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sametoken.config import EngineConfig
from sametoken.engine.request_memory import RequestMemory
from sametoken.engine.step_memory import (
    StepMemory,
    experts_per_row,
    most_adapted,
    most_expanded,
    most_mixing,
)
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.load.quantization import kv_strategy
from sametoken.models.load.settings import KV_SCHEME
from sametoken.models.registry import require_divisible
from sametoken.ops.cache_types import (
    LayerCache,
    blocks_within,
    bytes_per_block,
    stored_in,
)
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.types.speculative_methods import EXTRACT
from sametoken.types.units import in_units

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 2**30

#: What "fp8_e4m3" is resolved to.
FP8 = "fp8"

#: The first compute capability that kernels have compiled for.
LEAST_CAPABILITY = (7, 5)

#: The first compute capability with float8 conversions.
FLOAT8_CAPABILITY = (8, 9)

#: Rotary angles are computed in fp32, which represents integers exactly up to here.
MAX_POSITIONS = 2**24

#: Upper limit of the default ``max_model_len``, whatever the checkpoint declares.
MAX_DEFAULT_MODEL_LEN = 2**20

#: Memory reserved on a GPU for activations, graphs and library workspaces, at least; and the
#: part of it that is not the steps' own.
GPU_RESERVE_BYTES = 4 * 2**30
GPU_FIXED_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The engine's settings with every "auto" resolved.

    Attributes:
        config: the user's options, with sizes of 0 replaced by the device's defaults and
            options that recurrent state rules out turned off.
        reasons: option name to the reason for its value, for ``--explain``.
        usual_rows: as in ``SchedulerLimits``.
        kernels, attention_kernels: names of what computes models, and of what computes attention.
        weights_bytes, kv_bytes: memory of the target's weights and of all KV caches.
        adapters_bytes: of adapters beside them, part of ``weights_bytes``.
        recurrent_bytes: memory of all slots' recurrent state, not included in ``kv_bytes``.
        step_bytes: memory of the largest step while it runs.
        num_kept_states: recurrent states that are kept for prefix caching at most.
        kept_states_bytes: their memory and that of a reserved one.
        request_memory: memory of one request.
    """

    config: EngineConfig
    model_path: Path
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    num_kv_blocks: int
    usual_rows: int
    kernels: str
    attention_kernels: str
    reasons: dict[str, str]
    weights_bytes: int
    kv_bytes: int
    recurrent_bytes: int = 0
    step_bytes: int = 0
    num_kept_states: int = 0
    kept_states_bytes: int = 0
    request_memory: RequestMemory = field(default_factory=RequestMemory)
    adapters_bytes: int = 0

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values in memory."""
        return kv_dtype(self.config, self.dtype)

    @property
    def steps_in_flight(self) -> int:
        """Steps enqueued ahead of the host."""
        return self.config.steps_in_flight


#: Values of options that are 0, by device type. A CPU computes a step on the cores that plan
#: the next one, so running ahead gains nothing. A GPU reads KV in larger blocks. More rows per
#: step finish prompts sooner but delay the next token of decoding requests.
DEVICE_DEFAULTS = {
    "cpu": {
        "max_num_seqs": 64,
        "block_size": 16,
        "max_num_batched_tokens": 2048,
        "steps_in_flight": 1,
    },
    "cuda": {
        "max_num_seqs": 256,
        "block_size": 64,
        "max_num_batched_tokens": 8192,
        "steps_in_flight": 2,
    },
}

#: Rows of a step while no crowd of prompts waits, unless the user sizes the steps.
USUAL_ROWS = {"cpu": 2048, "cuda": 4096}

#: Approximate number of rows that a device computes in the time of one read of the weights, and of
#: one read of those that a row needs where it chooses experts.
ROWS_PER_WEIGHT_READ = {"cpu": 20, "cuda": 250}
ROWS_PER_SPARSE_READ = {"cpu": 20, "cuda": 90}

#: Steps of up to this many rows take as long as a step of one row, unless they choose experts.
FREE_ROWS = {"cpu": 0, "cuda": 16}

#: Bytes that the device could read in the time of what a step does beside the model.
STEP_BYTES = {"cpu": 50_000_000, "cuda": 0}

#: Bytes that the device could read in the time in which rows are sent to their experts, per layer.
ROUTING_BYTES = {"cpu": 0, "cuda": 130_000_000}

#: Rows from which on they hide all else that a step does.
BUSY_ROWS = {"cpu": 320, "cuda": 2000}


def resolve_device(config: EngineConfig) -> torch.device:
    """The device to run on: a GPU if there is one for the kernels, unless the CPU was requested.

    Raises:
        UnsupportedError: a CUDA device was requested and none can be used.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    why = no_gpu()
    if not why:
        return torch.device("cuda")
    if config.device == "cuda":
        raise UnsupportedError(f"device 'cuda' was requested but {why}", "use device 'cpu'")
    if torch.cuda.is_available():
        logger.warning("the GPU is not used: %s", why)
    return torch.device("cpu")


def no_gpu() -> str:
    """Why there is no GPU for the kernels; "": there is one."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.version.hip:
        return "there are no kernels for AMD's GPUs"
    capability = torch.cuda.get_device_capability()
    if capability >= LEAST_CAPABILITY:
        return ""
    least, own = _dotted(LEAST_CAPABILITY), _dotted(capability)
    return f"kernels need compute capability {least}, this one has {own}"


def resolve_sizes(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The config with every size of 0 replaced by the device's default."""
    defaults = DEVICE_DEFAULTS[device.type]
    sizes: dict[str, Any] = {name: getattr(config, name) or size for name, size in defaults.items()}
    rows = sizes["max_num_batched_tokens"]
    longest_chunk = min(config.prefill_chunk_size or rows, rows)
    return replace(config, **sizes, prefill_chunk_size=longest_chunk)


def require_ranks(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Refuse a number of ranks that does not fit the model or the machine.

    Raises:
        ConfigError: the model cannot be divided by it, or there are fewer GPUs.
        CheckpointError, UnsupportedError: as ``require_divisible``.
    """
    size = config.tensor_parallel_size
    require_divisible(model, size)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} GPUs, and there are "
            f"{torch.cuda.device_count()}",
            "use a smaller size",
        )


def require_room(config: EngineConfig) -> None:
    """Refuse a step that is too small for one window.

    Raises:
        ConfigError: names both sizes.
    """
    if config.max_num_batched_tokens <= config.num_speculative_tokens:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} holds no window of "
            f"{config.num_speculative_tokens + 1} rows",
            "raise max_num_batched_tokens or lower num_speculative_tokens",
        )


def require_quantization(config: EngineConfig, device: torch.device) -> None:
    """Refuse fp8 draft heads on devices without a kernel for them.

    Raises:
        UnsupportedError: names the device, or its compute capability.
    """
    spec = config.speculative_config
    if spec is None or spec.quantization is None:
        return
    wanted = f"quantization {spec.quantization!r} of a draft head"
    if device.type != "cuda":
        raise UnsupportedError(f"{wanted} does not run on a CPU", 'leave "quantization" out')
    require_float8(device, wanted, 'leave "quantization" out')


def resolve_kv_dtype(
    config: EngineConfig, model: ModelConfig, location: str, device: torch.device
) -> tuple[EngineConfig, dict[str, str]]:
    """The config with ``kv_cache_dtype`` "auto" (the model's dtype), or "fp8" and why.

    Raises:
        CheckpointError: the checkpoint's ``kv_cache_scheme`` is malformed.
        UnsupportedError: it is another one, or the device has no float8.
    """
    strategy, given = kv_strategy(model.extra, location), config.kv_cache_dtype
    if given == "auto" and strategy is None:
        return config, {}
    if device.type == "cuda":
        require_float8(device, "KV in fp8", "use kv_cache_dtype 'auto', or another checkpoint")
    asked = "requested" if given != "auto" else f"the checkpoint has a {KV_SCHEME}"
    scales = f"scales are the checkpoint's, by {strategy}" if strategy else "scales are 1"
    return replace(config, kv_cache_dtype=FP8), {"kv_cache_dtype": f"fp8: {asked}; {scales}"}


def require_float8(device: torch.device, wanted: str, remedy: str) -> None:
    """Refuse a GPU without float8 conversions.

    Raises:
        UnsupportedError: names what was wanted, and the compute capability.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        raise UnsupportedError(
            f"{wanted} needs a GPU of compute capability {_dotted(FLOAT8_CAPABILITY)}, "
            f"this one has {_dotted(capability)}",
            remedy,
        )


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values in memory, of a resolved config."""
    return FLOAT8 if config.kv_cache_dtype == FP8 else dtype


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def resolve_steps(
    config: EngineConfig,
    target: Decoder,
    head: object,
    dtype: torch.dtype,
    device: torch.device,
    num_aux_layers: int,
) -> StepMemory:
    """What steps of a target and its draft head need.

    Args:
        config: the user's options, sizes resolved.
        target: the model, or its shapes alone.
        head: of the drafter; None if it has none.
        dtype: of the activations.
        device: where they run.
        num_aux_layers: layers whose inputs the drafter reads.
    """
    models, stored, sizes = (target, head), kv_dtype(config, dtype), dict[str, int]()
    # A CPU widens elements in registers, and mixes and adapts row by row.
    if device.type != "cpu":
        longest = resolve_max_model_len(config, target.config)
        sizes = {
            "num_expanded": most_expanded(models),
            "mixing": most_mixing(models, config, dtype, device, longest, stored=stored),
            "adapted": most_adapted(target, experts_per_row(target.config)),
        }
    caches = stored_in(target.caches, stored)
    return StepMemory.of(config, target.config, caches, dtype, num_aux_layers, **sizes)


def resolve_kv_bytes(
    config: EngineConfig,
    device: torch.device,
    recurrent_bytes: int = 0,
    steps: StepMemory | None = None,
) -> int:
    """KV memory in bytes, computed after all weights are loaded.

    Args:
        config: the user's options, sizes resolved.
        device: where the engine runs.
        recurrent_bytes: GPU memory for recurrent state.
        steps: memory of steps.

    Raises:
        ConfigError: weights, recurrent state and steps leave no memory within
            ``gpu_memory_utilization``.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cpu":
        return CPU_KV_BYTES
    # Return the blocks that torch's caching allocator kept while loading.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    unused = int(total * (1 - config.gpu_memory_utilization))
    rows = config.max_num_batched_tokens
    step_bytes = steps.bytes_of(rows) if steps else 0
    usable = free - unused - recurrent_bytes
    left = usable - max(GPU_RESERVE_BYTES, GPU_FIXED_BYTES + step_bytes)
    if left <= 0:
        fits = steps.rows_within(usable // 2 - GPU_FIXED_BYTES) if steps else 0
        lower = f"max_num_batched_tokens to {fits}" if 0 < fits < rows else "max_num_seqs"
        raise ConfigError(
            f"{in_units(free)} of free memory, {in_units(recurrent_bytes)} of it for recurrent "
            f"state and {in_units(step_bytes)} for a step of {rows} rows, leave no KV memory at "
            f"gpu_memory_utilization={config.gpu_memory_utilization}",
            f"lower {lower}, raise gpu_memory_utilization, or use a smaller model",
        )
    return left


def resolve_dtype(config: EngineConfig, checkpoint_dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """The activation and weight dtype, and why."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype), "requested"
    if checkpoint_dtype == torch.float32:
        return torch.float32, "the checkpoint is fp32"
    return torch.bfloat16, f"the checkpoint is {str(checkpoint_dtype).removeprefix('torch.')}"


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The maximum length of a request that the model allows, in tokens; memory may lower it.

    Raises:
        ConfigError: the requested length exceeds the model's positions.
    """
    longest = min(model.max_position_embeddings, MAX_POSITIONS)
    if config.max_model_len is None:
        return min(longest, MAX_DEFAULT_MODEL_LEN)
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the model's {longest}",
            "lower max_model_len",
        )
    return config.max_model_len


def reachable_positions(
    config: EngineConfig, caches: tuple[LayerCache, ...], device: torch.device, max_len: int
) -> int:
    """Upper bound of a request's length before weights are loaded, which sizes rotary tables.

    Args:
        config: the user's options, sizes resolved.
        caches: caches of the target's layers.
        device: where the engine runs.
        max_len: from ``resolve_max_model_len``.
    """
    block_bytes = bytes_per_block(caches, config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif block_bytes:
        num_blocks = blocks_within(_most_kv_bytes(config, device), block_bytes)
    else:
        return max_len
    return min(max_len, max(num_blocks, 1) * config.block_size)


def _most_kv_bytes(config: EngineConfig, device: torch.device) -> int:
    """Upper bound of ``resolve_kv_bytes`` for any size of weights."""
    if config.kv_cache_memory_bytes is None and device.type != "cpu":
        return int(torch.cuda.mem_get_info(device)[1])
    return resolve_kv_bytes(config, device)


def resolve_extraction(
    config: EngineConfig, device: torch.device
) -> tuple[EngineConfig, dict[str, str]]:
    """Turn off what extraction of hidden states or experts rules out; returns the reasons too."""
    spec, reasons = config.speculative_config, {}
    extracts = spec is not None and spec.method == EXTRACT
    if not extracts and not config.enable_return_routed_experts:
        return config, {}
    if config.enable_prefix_caching:
        what = "states" if extracts else "experts"
        reasons["enable_prefix_caching"] = f"off: {what} of cached positions are not computed"
    if extracts and device.type == "cuda" and not config.enforce_eager:
        reasons["enforce_eager"] = "on: states are copied out of eager steps"
    eager = config.enforce_eager or "enforce_eager" in reasons
    return replace(config, enable_prefix_caching=False, enforce_eager=eager), reasons

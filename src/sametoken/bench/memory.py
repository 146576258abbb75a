"""A model's memory, from the config.json of target and drafter alone.

The loading code builds both on the meta device: tensors with shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sametoken.config import DUMMY, EngineConfig
from sametoken.drafters.base import Placement
from sametoken.drafters.build import load_drafter, needs_of_drafter, require_token_map
from sametoken.engine.adapters import adapted, read_adapters, resolve_adapters, widest_of
from sametoken.engine.fast_prompts import require_fast_form
from sametoken.engine.kept_memory import count_kept_states, kept_states_bytes
from sametoken.engine.request_memory import RequestMemory
from sametoken.engine.resolve import (
    kv_dtype,
    resolve_device,
    resolve_dtype,
    resolve_kv_bytes,
    resolve_kv_dtype,
    resolve_max_model_len,
    resolve_sizes,
    resolve_steps,
)
from sametoken.engine.swap_plan import plan_swap_of
from sametoken.errors import ConfigError
from sametoken.layers.parallel import SINGLE_RANK
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.drafter_config import complete_drafter
from sametoken.models.hub import Needed
from sametoken.models.load.dummy import dummy_reader
from sametoken.models.load.quantization import read_quantization
from sametoken.models.loader import read_config
from sametoken.models.names import resolve_drafter, resolve_model
from sametoken.models.registry import model_class
from sametoken.ops.backend import Kernels
from sametoken.ops.cache_types import LayerCache, bytes_per_block, stored_in
from sametoken.ops.dispatch import Backend
from sametoken.ops.lookup import ngram, suffix
from sametoken.ops.model.low_rank import AdaptedWeight, Room, RowAdapters
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.step import compact
from sametoken.ops.weight import Weight

#: Tensors on the meta device have shapes and no memory.
SHAPES_ONLY = torch.device("meta")


@dataclass(frozen=True, slots=True)
class SwapLimits:
    """Bytes that swapped KV may take: in host memory and, with ``swap_dir``, in a file."""

    host: int = 0
    file: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes, before anything is loaded.

    Attributes:
        model: path of the target.
        dtype: dtype of weights and activations.
        method: speculative method; None without speculation.
        block_size: tokens per KV block.
        max_model_len, max_num_seqs: the longest request, and how many run at once.
        weights, draft_weights: matrices. Those that both share count for the target, an fp8
            copy of them for the drafter.
        num_kept_states, kept_states: recurrent states that are kept for prefix caching at most;
            bytes of all of them and of a reserved one, part of the KV memory.
        request: memory of one request.
        swap: host memory and disk for swapped KV, at most.
        max_num_batched_tokens, step: the rows of the largest step, and its memory while it runs.
    """

    model: str
    dtype: str
    method: str | None
    block_size: int
    max_model_len: int
    max_num_seqs: int
    weights: int
    draft_weights: int
    num_kept_states: int
    kept_states: int
    request: RequestMemory
    swap: SwapLimits
    max_num_batched_tokens: int
    step: int

    @property
    def kv_per_block(self) -> int:
        """Bytes of one KV block, the drafter's included."""
        return self.block_size * (self.request.kv_per_token + self.request.draft_kv_per_token)

    @property
    def speculation_per_request(self) -> int:
        """Bytes that speculation adds to a request of ``max_model_len`` tokens."""
        return self.request.speculation(self.max_model_len)

    @property
    def per_request(self) -> int:
        """Bytes of a request of ``max_model_len`` tokens."""
        return self.request.total(self.max_model_len)

    @property
    def total(self) -> int:
        """Bytes of all weights and of ``max_num_seqs`` requests of ``max_model_len`` tokens.

        Without those of a step.
        """
        return self.weights + self.draft_weights + self.max_num_seqs * self.per_request

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON values, derived numbers included."""
        derived = ("kv_per_block", "speculation_per_request", "per_request", "total")
        own = asdict(self)
        own["request"] |= {"state_per_draft": self.request.state_per_draft}
        return own | {name: getattr(self, name) for name in derived}


def measure_memory(
    config: EngineConfig, announce: Callable[[str], None] = lambda text: None
) -> Memory:
    """Compute the memory of an engine with this config.

    Kept states are counted for the KV memory of ``max_num_seqs`` requests of ``max_model_len``
    tokens on a GPU, unless ``kv_cache_memory_bytes`` is given. Adapters that may come are counted
    on a GPU, which has memory for them from the start; a CPU has it as they come.

    Args:
        config: the engine's options.
        announce: called with one line per download.

    Raises:
        ConfigError, CheckpointError, UnsupportedError, DrafterMismatchError: as
            ``build_engine``.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "the memory of one of several ranks is not known before they start",
            "leave tensor_parallel_size out: each has about its share of the weights and of KV, "
            "at least one KV head",
        )
    device = resolve_device(config)
    config = resolve_sizes(config, device)
    path = resolve_model(config.model, announce, Needed.CONFIG)
    spec, _ = resolve_drafter(config.speculative_config, path, announce, DUMMY)
    spec, _ = complete_drafter(spec)
    config = replace(config, speculative_config=spec)
    architecture = read_config(path, load_format=config.load_format)
    dtype, _ = resolve_dtype(config, architecture.dtype)
    config, _ = resolve_kv_dtype(config, architecture, str(path), device)
    longest = resolve_max_model_len(config, architecture)
    require_token_map(spec, architecture)
    kernels = _PlacesForAdapters() if device.type == "cuda" else None
    target = load_shapes(architecture, path, dtype, kernels)
    config = resolve_adapters(config, architecture, announce)
    model = adapted(target, read_adapters(config), config, SINGLE_RANK, dtype, SHAPES_ONLY)
    widest = widest_of(target, model)
    require_fast_form(config, target.caches)
    backend = Backend(ReferenceKernels(), compact, ngram.lookup, suffix.search)
    placement = Placement(backend, dtype, SHAPES_ONLY, longest, 1, DUMMY, path)
    drafter = load_drafter(spec, target, placement)
    aux_layers = needs_of_drafter(spec, architecture, dtype, path, DUMMY).aux_layers
    own, drafts = (stored_in(one.caches, kv_dtype(config, dtype)) for one in (target, drafter))
    steps = resolve_steps(config, widest, drafter.model, dtype, device, len(aux_layers))
    caches = (*own, *drafts)
    num_kept_states, _ = count_kept_states(
        config, caches, _kv_bytes(config, device, bytes_per_block(caches, longest))
    )
    return Memory(
        model=str(path),
        dtype=str(dtype).removeprefix("torch."),
        method=spec.method if spec else None,
        block_size=config.block_size,
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs,
        weights=widest.weights_bytes,
        draft_weights=drafter.weights_bytes,
        num_kept_states=num_kept_states,
        kept_states=kept_states_bytes(config, caches, num_kept_states),
        request=RequestMemory.of(config.num_speculative_tokens, own, drafts),
        swap=_swap_limits(config, caches, longest),
        max_num_batched_tokens=config.max_num_batched_tokens,
        step=steps.bytes_of(config.max_num_batched_tokens),
    )


def _swap_limits(
    config: EngineConfig, caches: tuple[LayerCache, ...], max_model_len: int
) -> SwapLimits:
    plan = plan_swap_of(config, caches, max_model_len)
    block_bytes = bytes_per_block(caches, config.block_size)
    return SwapLimits(plan.num_host_blocks * block_bytes, plan.num_file_blocks * block_bytes)


def _kv_bytes(config: EngineConfig, device: torch.device, request_bytes: int) -> int:
    """KV memory; that of a GPU is only known once the weights are loaded."""
    if device.type == "cuda" and config.kv_cache_memory_bytes is None:
        return config.max_num_seqs * request_bytes
    return resolve_kv_bytes(config, device)


class _PlacesForAdapters(ReferenceKernels):
    """Kernels whose adapters have their memory before they come, as on a GPU."""

    def adapt(
        self, weight: Weight, sizes: Sequence[int], room: Room, rows: RowAdapters
    ) -> AdaptedWeight:
        # Only CUDA builds of torch include Triton.
        from sametoken.ops.model.low_rank_triton import StackedUpdates

        updates = StackedUpdates.of(weight.in_features, sizes, room)
        return AdaptedWeight(weight, updates, rows, self.silu_mul)


def load_shapes(
    architecture: ModelConfig, path: Path, dtype: torch.dtype, kernels: Kernels | None = None
) -> Decoder:
    """Build a model on the meta device, from its config alone; by default of a CPU's layouts.

    Raises:
        CheckpointError, UnsupportedError: as ``load_model``.
    """
    quantization = read_quantization(architecture.extra, str(path))
    kernels = kernels or ReferenceKernels()
    family, names = model_class(architecture.architecture), Decoder.dummy_names(architecture)
    reader = dummy_reader(path, kernels, dtype, SHAPES_ONLY, names, quantization=quantization)
    return family(architecture, reader, max_positions=1)

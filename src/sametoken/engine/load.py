"""Validate an engine's options, load its models and plan its memory; nothing is allocated yet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sametoken.config import DUMMY, EngineConfig
from sametoken.distributed.ranks import Ranks
from sametoken.drafters.base import DrafterNeeds, LoadedDrafter, Placement
from sametoken.drafters.build import (
    load_drafter,
    needs_of_drafter,
    require_drafter_files,
    require_token_map,
)
from sametoken.engine.adapters import adapted, read_adapters, resolve_adapters, widest_of
from sametoken.engine.fast_prompts import fast_form, require_expandable, require_fast_form
from sametoken.engine.kept_memory import kept_states_bytes, require_kept_states
from sametoken.engine.memory_plan import MemoryPlan, plan_memory, require_memory
from sametoken.engine.reasons import reasons_of_defaults
from sametoken.engine.request_memory import RequestMemory
from sametoken.engine.resolve import (
    USUAL_ROWS,
    ResolvedConfig,
    kv_dtype,
    reachable_positions,
    require_quantization,
    require_ranks,
    require_room,
    resolve_device,
    resolve_dtype,
    resolve_extraction,
    resolve_kv_bytes,
    resolve_kv_dtype,
    resolve_max_model_len,
    resolve_sizes,
    resolve_steps,
)
from sametoken.engine.sampling_defaults import default_sampling_params
from sametoken.engine.step_memory import require_addressable
from sametoken.engine.swap_plan import SwapPlan, plan_swap_of, require_swap
from sametoken.errors import ConfigError
from sametoken.extraction.recording import Extraction
from sametoken.layers.parallel import SINGLE_RANK
from sametoken.layers.rotary import DRAFT_POSITIONS, LONGROPE
from sametoken.models.adapted import AdaptedModel
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.deepseek import latent_sizes
from sametoken.models.drafter_config import complete_drafter
from sametoken.models.hub import Needed
from sametoken.models.loader import load_model, read_config
from sametoken.models.names import resolve_drafter, resolve_model
from sametoken.models.registry import model_class
from sametoken.ops.backend import AttentionShape
from sametoken.ops.cache_types import (
    LayerCache,
    PagedKV,
    bytes_per_block,
    bytes_per_slot,
    divided,
    stored_in,
)
from sametoken.ops.dispatch import Backend, attention_kernels, select_backend
from sametoken.runner.routed_experts import Mixture, mixtures_of, recording
from sametoken.text.tokenizer import (
    load_tokenizer,
    load_tokenizer_of,
    require_own_end,
    require_same_tokens,
)
from sametoken.types.speculative_methods import HEADS, TABLE, Kind
from sametoken.types.units import in_units

#: The process that builds engines; its forks have it too.
_builders: set[int] = set()


@dataclass(frozen=True, slots=True)
class Requested:
    """The requested engine, validated as far as configs allow before loading.

    Attributes:
        given: the user's options.
        config: sizes resolved, the drafter's path in place of its name.
        path: the target's checkpoint.
        dtype: of weights and activations.
        needs: the drafter's; its caches are in the dtype of the weights.
        reasons: options that were turned off or filled in, and why.
    """

    given: EngineConfig
    config: EngineConfig
    device: torch.device
    path: Path
    architecture: ModelConfig
    dtype: torch.dtype
    needs: DrafterNeeds
    reasons: dict[str, str]

    @property
    def max_model_len(self) -> int:
        """The longest sequence, before memory is known."""
        return resolve_max_model_len(self.config, self.architecture)

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Of the target's layers, on one rank."""
        architecture, dtype = self.architecture, self.dtype
        family = model_class(architecture.architecture)
        declared = family.caches_of(architecture, dtype, str(self.path))
        size = self.config.tensor_parallel_size
        return stored_in(divided(declared, size), kv_dtype(self.config, dtype))

    @property
    def located(self) -> EngineConfig:
        """The user's options with paths in place of names: they are not looked up again."""
        names = ("speculative_config", "tokenizer", "lora_modules")
        found = {name: getattr(self.config, name) for name in names}
        return replace(self.given, model=str(self.path), **found)

    @property
    def all_states(self) -> bool:
        """See ``Step``; alike on all ranks, though only rank 0 records."""
        spec, last = self.config.speculative_config, self.architecture.num_layers
        # Heads without KV read sampled rows alone.
        has_kv = spec is not None and spec.method in HEADS and bool(self.needs.caches)
        drafter_reads = has_kv and not self.needs.aux_layers
        records = self.config.enable_return_routed_experts
        return drafter_reads or last in self.needs.aux_layers or records


@dataclass(frozen=True, slots=True)
class Loaded:
    """Loaded weights, the target's caches and resolved sizes; nothing else is allocated yet.

    Attributes:
        adapted: the target with adapters beside its weights; None: there are none.
    """

    target: Decoder
    adapted: AdaptedModel | None
    caches: tuple[LayerCache, ...]
    drafter: LoadedDrafter
    backend: Backend
    memory: MemoryPlan
    swap: SwapPlan
    resolved: ResolvedConfig
    extraction: Extraction
    all_states: bool

    @property
    def mixtures(self) -> list[Mixture]:
        """The target's mixtures of experts."""
        return [one for layer in self.target.layers for one in mixtures_of(layer)]


def validate(config: EngineConfig, announce: Callable[[str], None]) -> Requested:
    """Refuse what configs and options alone show to be impossible; errors as ``build_engine``."""
    _refuse_forks()
    device = resolve_device(config)
    require_quantization(config, device)
    given, config = config, resolve_sizes(config, device)

    def check(folder: Path) -> None:
        """Refuse what the target's small files show, before its weights are downloaded."""
        one, architecture, _ = _resolve_names(config, device, folder, announce)
        require_own_end(load_tokenizer_of(one, folder), architecture.vocab_size)

    path = resolve_model(config.model, announce, Needed.of(config.load_format), check)
    config, architecture, reasons = _resolve_names(config, device, path, announce)
    dtype, _ = resolve_dtype(config, architecture.dtype)
    spec, draft_format = config.speculative_config, config.draft_load_format
    size = config.tensor_parallel_size
    needs = needs_of_drafter(spec, architecture, dtype, path, draft_format, size)
    require_drafter_files(spec, draft_format)
    requested = Requested(given, config, device, path, architecture, dtype, needs, reasons)
    require_fast_form(config, requested.caches)
    _require_kv(requested)
    _builders.add(os.getpid())
    return requested


def _resolve_names(
    config: EngineConfig, device: torch.device, path: Path, announce: Callable[[str], None]
) -> tuple[EngineConfig, ModelConfig, dict[str, str]]:
    """The config with paths in place of names, the target's own, and reasons for what changed.

    Of a target's directory it needs the small files alone.
    """
    spec, shipped = resolve_drafter(
        config.speculative_config, path, announce, config.draft_load_format
    )
    spec, completed = complete_drafter(spec)
    config = replace(config, speculative_config=spec)
    if config.tokenizer is not None and not config.skip_tokenizer_init:
        # A server may load it after the weights, so that a wrong name must be found before.
        tokenizer = resolve_model(config.tokenizer, announce, Needed.TOKENIZER)
        config = replace(config, tokenizer=str(tokenizer))
    architecture = read_config(path, load_format=config.load_format)
    # Programs and servers read it once the model is loaded.
    default_sampling_params(path, config.generation_config)
    resolve_max_model_len(config, architecture)
    require_room(config)
    require_ranks(config, architecture, device)
    require_swap(config)
    config = resolve_adapters(config, architecture, announce)
    require_token_map(spec, architecture)
    _require_same_tokens(config, architecture, path)
    config, extracting = resolve_extraction(config, device)
    config, stored = resolve_kv_dtype(config, architecture, str(path), device)
    return config, architecture, shipped | completed | extracting | stored


def _require_same_tokens(config: EngineConfig, target: ModelConfig, path: Path) -> None:
    """Refuse a draft model of another vocabulary; one that is only padded otherwise is none.

    Raises:
        DrafterMismatchError: as ``require_same_tokens``.
        CheckpointError, UnsupportedError: a tokenizer cannot be read.
    """
    spec = config.speculative_config
    if spec is None or spec.model is None or TABLE[spec.method].kind is not Kind.MODEL:
        return
    draft = Path(spec.model)
    # Dummy weights tell times alone, and may have no tokenizer.
    if config.load_format == DUMMY or read_config(draft).vocab_size == target.vocab_size:
        return
    is_own = config.tokenizer is None or config.skip_tokenizer_init
    require_same_tokens(
        load_tokenizer(draft), load_tokenizer(path if is_own else Path(str(config.tokenizer)))
    )


def _require_kv(requested: Requested) -> None:
    """Refuse KV memory for less than one request, where its size does not follow from weights.

    Raises:
        ConfigError: as ``plan_memory``.
    """
    config, device = requested.config, requested.device
    counted = config.num_kv_blocks is not None
    if counted or device.type == "cpu" or config.kv_cache_memory_bytes is not None:
        # The budget of a GPU follows from weights, and does not matter to blocks that are counted.
        budget = 0 if counted else resolve_kv_bytes(config, device)
        needs, dtype = requested.needs, kv_dtype(config, requested.dtype)
        caches = (*requested.caches, *stored_in(needs.caches, dtype))
        plan_memory(config, requested.architecture, caches, needs.lookahead_slots, budget)


def _refuse_forks() -> None:
    """Refuse an engine in a fork: its first parallel operation would wait for threads for ever."""
    for builder in _builders - {os.getpid()}:
        raise ConfigError(
            f"process {builder} has built an engine, and process {os.getpid()} is its fork, "
            "without its threads and its device",
            "start the process by spawn, or fork before an engine is built",
        )


def load(
    requested: Requested, ranks: Ranks, extraction: Extraction, announce: Callable[[str], None]
) -> Loaded:
    """Read the weights, and plan the memory beside them; errors as ``build_engine``."""
    begun = time.monotonic()
    config, device, architecture = requested.config, requested.device, requested.architecture
    dtype, why = resolve_dtype(config, architecture.dtype)
    if architecture.also_sees:
        announce(f"{architecture.architecture}: only the text decoder is loaded")
    # Before the weights, which may take minutes.
    adapters = read_adapters(config, ranks.broadcast_object)
    target, drafter, backend = _load_models(requested, ranks)
    model = adapted(target, adapters, config, ranks.parallel, dtype, device)
    widest = widest_of(target, model)
    made = "made random" if config.load_format == DUMMY else "loaded"
    num_bytes = widest.weights_bytes + drafter.weights_bytes
    announce(f"{made} weights of {in_units(num_bytes)} in {time.monotonic() - begun:.1f} s")
    own = stored_in(target.caches, kv_dtype(config, dtype))
    caches = (*own, *drafter.caches)
    per_slot = bytes_per_slot(caches, config.num_speculative_tokens)
    recurrent_bytes = (config.max_num_seqs + 1) * per_slot
    num_aux_layers = len(requested.needs.aux_layers)
    steps = resolve_steps(config, widest, drafter.model, dtype, device, num_aux_layers)
    budget = ranks.reduce_min(resolve_kv_bytes(config, device, recurrent_bytes, steps))
    lookahead = requested.needs.lookahead_slots
    memory = ranks.broadcast_object(plan_memory(config, architecture, caches, lookahead, budget))
    if memory.max_model_len < requested.max_model_len:
        announce(f"max_model_len is {memory.max_model_len}: {memory.reasons['max_model_len']}")
    _announce_reach(drafter, memory.max_model_len, announce)
    config, off_reasons = require_kept_states(config, caches, memory.num_kept_states)
    off_reasons = requested.reasons | off_reasons
    for name, reason in off_reasons.items():
        announce(f"{name} is {reason}")
    swap = ranks.broadcast_object(plan_swap_of(config, caches, memory.max_model_len))
    defaults = reasons_of_defaults(requested.given, device.type)
    resolved = ResolvedConfig(
        config=config,
        model_path=requested.path,
        model=architecture,
        dtype=dtype,
        device=device,
        max_model_len=memory.max_model_len,
        num_kv_blocks=memory.num_kv_blocks,
        usual_rows=requested.given.max_num_batched_tokens or USUAL_ROWS[device.type],
        kernels=backend.model.name,
        attention_kernels=_attention_kernels(backend, requested, own),
        reasons={**defaults, **memory.reasons, **swap.reasons, **off_reasons, "dtype": why},
        weights_bytes=widest.weights_bytes,
        adapters_bytes=widest.weights_bytes - target.weights_bytes,
        kv_bytes=bytes_per_block(caches, config.block_size) * (memory.num_kv_blocks + 1),
        recurrent_bytes=recurrent_bytes,
        step_bytes=steps.bytes_of(config.max_num_batched_tokens),
        num_kept_states=memory.num_kept_states,
        kept_states_bytes=kept_states_bytes(config, caches, memory.num_kept_states),
        request_memory=RequestMemory.of(config.num_speculative_tokens, own, drafter.caches),
    )
    require_memory(resolved, lookahead)
    return Loaded(
        target,
        model,
        own,
        drafter,
        backend,
        memory,
        swap,
        resolved,
        extraction,
        requested.all_states,
    )


def _announce_reach(
    drafter: LoadedDrafter, max_model_len: int, announce: Callable[[str], None]
) -> None:
    """Say where a draft model ends before the longest request."""
    if isinstance(drafter.model, Decoder):
        most = drafter.model.config.max_position_embeddings
        if most < max_model_len:
            announce(f"the draft model has {most} positions: requests have no drafts beyond")


def _attention_kernels(
    backend: Backend, requested: Requested, caches: tuple[LayerCache, ...]
) -> str:
    config, kernels = requested.config, backend.model.name
    dtype, size, device = requested.dtype, config.block_size, requested.device
    heads = requested.architecture.num_heads // config.tensor_parallel_size
    # A layer without KV heads reads another's.
    paged = (one for one in caches if isinstance(one, PagedKV) and one.num_kv_heads)
    asked = {(AttentionShape(heads, one.num_kv_heads, one.k_dim), one.dtype) for one in paged}
    found = {attention_kernels(kernels, one, dtype, kv, size, device) for one, kv in asked}
    return " and ".join(sorted(found)) or kernels


def _load_models(requested: Requested, ranks: Ranks) -> tuple[Decoder, LoadedDrafter, Backend]:
    """Read the weights of this rank."""
    config, device, path = requested.config, requested.device, requested.path
    # Every rank runs a model that drafts; rank 0 alone looks drafts up, or records.
    spec, leads = config.speculative_config, ranks.parallel.rank == 0
    if spec is not None and not leads and TABLE[spec.method].kind not in (Kind.MODEL, Kind.HEAD):
        spec = None
    layers = requested.needs.aux_layers if spec is not None else ()
    max_len, own = requested.max_model_len, requested.caches
    require_addressable(config, own, device)
    # The table's length chooses LongRoPE's factors, which memory must not: a batch may be resumed.
    bounded = requested.architecture.rope["rope_type"] != LONGROPE
    reachable = reachable_positions(config, own, device, max_len) if bounded else max_len
    max_positions = reachable + DRAFT_POSITIONS
    backend = select_backend(device)
    if fast_form(config, own).expands:
        require_expandable(latent_sizes(requested.architecture, str(path)), backend.model)
    # Each rank routes all rows alike, so rank 0 records them.
    records = leads and config.enable_return_routed_experts
    target = load_model(
        path,
        kernels=recording(backend.model) if records else backend.model,
        dtype=requested.dtype,
        device=device,
        max_positions=max_positions,
        load_format=config.load_format,
        parallel=ranks.parallel,
    ).keeping(layers)
    placement = Placement(
        backend,
        requested.dtype,
        device,
        max_len,
        max_positions,
        config.draft_load_format,
        path,
        ranks.parallel if requested.needs.num_ranks > 1 else SINGLE_RANK,
    )
    drafter = load_drafter(spec, target, placement)
    drafter = replace(drafter, caches=stored_in(drafter.caches, kv_dtype(config, requested.dtype)))
    return target, drafter, backend

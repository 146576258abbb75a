"""Build an engine: validate options, load models, allocate memory, assemble the runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sametoken.config import DUMMY, EngineConfig
from sametoken.distributed.ranks import Ranks, start_ranks
from sametoken.drafters.base import Drafter, LoadedDrafter, Placement
from sametoken.drafters.build import load_drafter, require_drafter_fits, required_aux_layers
from sametoken.drafters.combined import share_drafter
from sametoken.drafters.context import Coupling
from sametoken.engine.core import EngineCore
from sametoken.engine.kept_memory import kept_states_bytes, require_kept_states
from sametoken.engine.memory_plan import MemoryPlan, plan_memory, require_memory
from sametoken.engine.reasons import reasons_of_defaults
from sametoken.engine.resolve import (
    ROWS_PER_WEIGHT_READ,
    RequestMemory,
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
)
from sametoken.engine.shared_weights import LeadingWeights
from sametoken.engine.sleep import memory_of
from sametoken.engine.step_memory import StepMemory, most_expanded
from sametoken.engine.swap_plan import SwapPlan, plan_swap_of, require_swap
from sametoken.engine.weights import Weights, weights_of
from sametoken.errors import ConfigError
from sametoken.extraction.recording import Extraction, NoExtraction, open_extraction
from sametoken.io.swap_file import SwapFile
from sametoken.layers.rotary import DRAFT_POSITIONS
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
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
    common_window,
    stored_in,
)
from sametoken.ops.dispatch import Backend, attention_kernels, select_backend
from sametoken.ops.step.types import Chances
from sametoken.runner.async_output import OutputRing
from sametoken.runner.kept_states import KeptStates
from sametoken.runner.logits_processing import LogitsProcessing
from sametoken.runner.routed_experts import recorder_of, recording
from sametoken.runner.runner import EagerLauncher, Launcher, Runner, StepRunner
from sametoken.runner.step import Step, conditional_rates
from sametoken.runner.swap import SwapStore
from sametoken.sampling.grammar_masks import SlotGrammars
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.scheduler import Scheduler
from sametoken.state.caches import ModelCache
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.types.speculative_config import ADAPTIVE
from sametoken.types.units import in_units


@dataclass(frozen=True, slots=True)
class _Requested:
    """The requested engine, validated as far as configs allow before loading.

    Attributes:
        given: the user's options.
        config: sizes resolved, the drafter's path in place of its name.
        path: the target's checkpoint.
        dtype: dtype of weights and activations, and the reason.
        aux_layers: the target's layers whose inputs the drafter reads.
        reasons: options that were turned off or filled in, and why.
    """

    given: EngineConfig
    config: EngineConfig
    device: torch.device
    path: Path
    architecture: ModelConfig
    dtype: tuple[torch.dtype, str]
    aux_layers: tuple[int, ...]
    reasons: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Loaded weights, the target's caches and resolved sizes; nothing else is allocated yet."""

    target: Decoder
    caches: tuple[LayerCache, ...]
    drafter: LoadedDrafter
    backend: Backend
    memory: MemoryPlan
    swap: SwapPlan
    resolved: ResolvedConfig
    extraction: Extraction


def build_engine(
    config: EngineConfig, announce: Callable[[str], None] = lambda text: None
) -> EngineCore:
    """Load a target and its drafter, and allocate memory for them.

    Args:
        config: the user's options.
        announce: called with a line of text on each download and slow phase.

    Raises:
        ConfigError: options contradict each other, the model, or the memory.
        CheckpointError: a checkpoint is missing or broken.
        UnsupportedError: an architecture, method or device is not implemented.
        DrafterMismatchError: the drafter does not fit the target.
        EngineDeadError: another rank of the model failed for another reason.
    """
    requested = _validate(config, announce)
    extraction = open_extraction(
        requested.config.speculative_config,
        requested.path,
        requested.architecture,
        requested.aux_layers,
        requested.dtype[0],
    )
    try:
        ranks = start_ranks(replace(requested.config, model=str(requested.path)), requested.device)
        with ranks.stopped_by_errors():
            with _memory_errors_explained():
                loaded = _load(requested, ranks, extraction, announce)
                runner = _assemble(loaded, ranks, announce)
            scheduler = Scheduler(_limits(loaded, runner.step.drafter), _swap_file(loaded, runner))
            leader = ranks.lead(runner)
            shared, own = ranks.parallel.size > 1, _weights(loaded, ranks)
            weights = LeadingWeights(own, ranks) if shared else own
            memory, resolved = memory_of(runner, loaded.target, shared=shared), loaded.resolved
            return EngineCore(resolved, scheduler, leader, extraction, ranks, weights, memory)
    except BaseException:
        extraction.close()
        raise


def build_follower(config: EngineConfig, ranks: Ranks) -> tuple[Runner, Weights]:
    """Build the runner of a follower rank, and its weights.

    Raises:
        SametokenError: as in ``build_engine``.
    """
    requested = _validate(config, _silent)
    with _memory_errors_explained():
        loaded = _load(requested, ranks, NoExtraction(), _silent)
        return _assemble(loaded, ranks, _silent), _weights(loaded, ranks)


def _weights(loaded: _Loaded, ranks: Ranks) -> Weights:
    return weights_of(loaded.target, loaded.drafter, loaded.resolved, ranks.parallel)


@contextmanager
def _memory_errors_explained() -> Iterator[None]:
    """Turn an out-of-memory error into a ``ConfigError``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        # On a CPU torch raises a plain RuntimeError.
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_memory and "can't allocate memory" not in first_line:
            raise
        raise ConfigError(
            f"the model does not fit the memory ({first_line or 'MemoryError'})",
            "lower num_kv_blocks, kv_cache_memory_bytes, max_num_seqs or max_model_len, "
            "or use a smaller model",
        ) from error


def _silent(text: str) -> None:
    """Drop an announcement that rank 0 has already made."""


def _assemble(loaded: _Loaded, ranks: Ranks, announce: Callable[[str], None]) -> StepRunner:
    resolved, memory, backend = loaded.resolved, loaded.memory, loaded.backend
    config, device, mode = resolved.config, resolved.device, resolved.config.logprobs_mode
    kv = _allocate(loaded, loaded.caches)
    sequences = Sequences.allocate(
        max_num_seqs=config.max_num_seqs,
        max_len=memory.max_model_len + config.num_speculative_tokens + 1,
        num_drafts=config.num_speculative_tokens,
        block_size=config.block_size,
        reserved_block=kv.reserved_block,
        device=device,
    )
    table = SamplingTable.allocate(config.max_num_seqs, device)
    drafter = loaded.extraction.wrap(_attach_drafter(loaded, table))
    experts = recorder_of(loaded.target, config.max_num_batched_tokens, device)
    steps, on_gpu = resolved.steps_in_flight, device.type == "cuda"
    ring = OutputRing.allocate(
        steps + 1, config.max_num_seqs, config.num_speculative_tokens, pinned=on_gpu
    )
    step = Step(
        sequences=sequences,
        model=experts or loaded.target,
        kv=kv,
        kernels=backend.model,
        ops=backend.step,
        table=table,
        drafter=share_drafter(drafter, config.num_speculative_tokens, ranks.parallel),
        results=ring.rows,
        chances=_chances(loaded, table),
        parallel=ranks.parallel,
    )
    grammars = SlotGrammars(sequences)
    processing = LogitsProcessing(
        sequences, loaded.target, backend.model, table, grammars, ranks.parallel, mode
    )
    caches = (kv, *drafter.kv_caches)
    return StepRunner(
        step=step,
        processing=processing,
        launcher=_launcher(step, processing, resolved, announce),
        swap=_swap_store(loaded, caches),
        kept_states=KeptStates(caches, memory.num_kept_states),
        stream=ranks.stream(device, steps),
        ring=ring,
        history=loaded.drafter.history,
        experts=experts,
    )


def _swap_store(loaded: _Loaded, caches: tuple[ModelCache, ...]) -> SwapStore:
    swap, on_gpu = loaded.swap, loaded.resolved.device.type == "cuda"
    return SwapStore(caches, swap.num_host_blocks, swap.limit, pinned=on_gpu)


def _swap_file(loaded: _Loaded, runner: StepRunner) -> SwapFile | None:
    directory = loaded.resolved.config.swap_dir
    if directory is None or not loaded.swap.num_file_blocks:
        return None
    return SwapFile(directory, loaded.swap.num_file_blocks, runner.swap.host.buffer)


def _chances(loaded: _Loaded, table: SamplingTable) -> Chances | None:
    speculative = loaded.resolved.config.speculative_config
    if speculative is None or speculative.synthetic_rates is None:
        return None
    rates = conditional_rates(speculative.synthetic_rates, loaded.resolved.device)
    return Chances(rates, table.seed)


def _launcher(
    step: Step,
    processing: LogitsProcessing,
    resolved: ResolvedConfig,
    announce: Callable[[str], None],
) -> Launcher:
    if resolved.device.type != "cuda":
        return EagerLauncher(step)
    # Only CUDA builds of torch include Triton.
    from sametoken.engine.build_gpu import gpu_launcher

    return gpu_launcher(step, processing, resolved, announce)


def _validate(config: EngineConfig, announce: Callable[[str], None]) -> _Requested:
    device = resolve_device(config)
    require_quantization(config, device)
    given, config = config, resolve_sizes(config, device)
    path = resolve_model(config.model, announce, Needed.of(config.load_format))
    spec, shipped = resolve_drafter(
        config.speculative_config, path, announce, config.draft_load_format
    )
    spec, completed = complete_drafter(spec)
    config = replace(config, speculative_config=spec)
    if config.tokenizer is not None and not config.skip_tokenizer_init:
        # Loaded after the weights, so that a wrong name must be found before.
        tokenizer = resolve_model(config.tokenizer, announce, Needed.TOKENIZER)
        config = replace(config, tokenizer=str(tokenizer))
    architecture = read_config(path, load_format=config.load_format)
    dtype = resolve_dtype(config, architecture.dtype)
    max_len = resolve_max_model_len(config, architecture)
    require_room(config)
    require_ranks(config, architecture, device)
    require_swap(config)
    require_drafter_fits(spec, architecture, max_len)
    config, reasons = resolve_extraction(config, device)
    config, stored = resolve_kv_dtype(config, architecture, str(path), device)
    layers = required_aux_layers(spec, architecture, path, config.draft_load_format)
    reasons = shipped | completed | reasons | stored
    return _Requested(given, config, device, path, architecture, dtype, layers, reasons)


def _load(
    requested: _Requested, ranks: Ranks, extraction: Extraction, announce: Callable[[str], None]
) -> _Loaded:
    begun = time.monotonic()
    if requested.architecture.also_sees:
        announce(f"{requested.architecture.architecture}: only the text decoder is loaded")
    target, drafter, backend = _load_models(requested, ranks)
    made = "made random" if requested.config.load_format == DUMMY else "loaded"
    num_bytes = target.weights_bytes + drafter.weights_bytes
    announce(f"{made} weights of {in_units(num_bytes)} in {time.monotonic() - begun:.1f} s")
    config = requested.config
    own = stored_in(target.caches, kv_dtype(config, requested.dtype[0]))
    caches = (*own, *drafter.caches)
    per_slot = bytes_per_slot(caches, config.num_speculative_tokens)
    recurrent_bytes = (config.max_num_seqs + 1) * per_slot
    architecture, (dtype, why) = requested.architecture, requested.dtype
    num_expanded = most_expanded((target, drafter.model), requested.device)
    num_aux = len(requested.aux_layers)
    steps = StepMemory.of(config, architecture, own, dtype, num_aux, num_expanded)
    budget = ranks.reduce_min(resolve_kv_bytes(config, requested.device, recurrent_bytes, steps))
    memory = ranks.broadcast_object(
        plan_memory(config, architecture, caches, drafter.lookahead_slots, budget)
    )
    config, off_reasons = require_kept_states(config, caches, memory.num_kept_states)
    off_reasons = requested.reasons | off_reasons
    for name, reason in off_reasons.items():
        announce(f"{name} is {reason}")
    swap = ranks.broadcast_object(plan_swap_of(config, caches, memory.max_model_len))
    defaults = reasons_of_defaults(requested.given, requested.device.type)
    resolved = ResolvedConfig(
        config=config,
        model_path=requested.path,
        model=architecture,
        dtype=dtype,
        device=requested.device,
        max_model_len=memory.max_model_len,
        num_kv_blocks=memory.num_kv_blocks,
        kernels=backend.model.name,
        attention_kernels=_attention_kernels(backend, requested, own, target.has_sinks),
        reasons={**defaults, **memory.reasons, **swap.reasons, **off_reasons, "dtype": why},
        weights_bytes=target.weights_bytes,
        kv_bytes=bytes_per_block(caches, config.block_size) * (memory.num_kv_blocks + 1),
        recurrent_bytes=recurrent_bytes,
        step_bytes=steps.bytes_of(config.max_num_batched_tokens),
        num_kept_states=memory.num_kept_states,
        kept_states_bytes=kept_states_bytes(config, caches, memory.num_kept_states),
        request_memory=RequestMemory.of(config.num_speculative_tokens, own, drafter.caches),
    )
    require_memory(resolved)
    return _Loaded(target, own, drafter, backend, memory, swap, resolved, extraction)


def _attention_kernels(
    backend: Backend, requested: _Requested, caches: tuple[LayerCache, ...], has_sinks: bool
) -> str:
    model, size, device = requested.architecture, requested.config.block_size, requested.device
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim)
    kernels, paged = backend.model.name, [one for one in caches if isinstance(one, PagedKV)]
    asked = {(replace(shape, head_dim=one.k_dim), one.dtype) for one in paged}
    found = {attention_kernels(kernels, *one, size, device, has_sinks=has_sinks) for one in asked}
    return " and ".join(sorted(found)) or kernels


def _load_models(requested: _Requested, ranks: Ranks) -> tuple[Decoder, LoadedDrafter, Backend]:
    """Read the weights of this rank."""
    config, device = requested.config, requested.device
    path, architecture = requested.path, requested.architecture
    dtype, _ = requested.dtype
    # Only rank 0 drafts, so only rank 0 loads the drafter.
    spec = config.speculative_config if ranks.parallel.rank == 0 else None
    layers = requested.aux_layers if ranks.parallel.rank == 0 else ()
    max_len = resolve_max_model_len(config, architecture)
    declared = model_class(architecture.architecture).caches_of(architecture, dtype, str(path))
    stored = kv_dtype(config, dtype)
    own = stored_in((cache.divided(ranks.parallel.size) for cache in declared), stored)
    max_positions = reachable_positions(config, own, device, max_len) + DRAFT_POSITIONS
    backend = select_backend(device)
    # Each rank routes all rows alike, so rank 0 records them.
    records = config.enable_return_routed_experts and ranks.parallel.rank == 0
    target = load_model(
        path,
        kernels=recording(backend.model) if records else backend.model,
        dtype=dtype,
        device=device,
        max_positions=max_positions,
        aux_layers=layers,
        load_format=config.load_format,
        parallel=ranks.parallel,
    )
    placement = Placement(
        backend, dtype, device, max_len, max_positions, config.draft_load_format, path
    )
    drafter = load_drafter(spec, target, placement)
    drafter = replace(drafter, caches=stored_in(drafter.caches, stored))
    return target, drafter, backend


def _allocate(loaded: _Loaded, caches: tuple[LayerCache, ...]) -> ModelCache:
    config = loaded.resolved.config
    return ModelCache.allocate(
        caches,
        num_blocks=loaded.memory.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        num_drafts=config.num_speculative_tokens,
        device=loaded.resolved.device,
    )


def _attach_drafter(loaded: _Loaded, table: SamplingTable) -> Drafter:
    caches = loaded.drafter.caches
    cache = _allocate(loaded, caches) if caches else None
    return loaded.drafter.attach(cache, Coupling(loaded.backend.model.sample, table))


def _limits(loaded: _Loaded, drafter: Drafter) -> SchedulerLimits:
    config, memory = loaded.resolved.config, loaded.memory
    speculative = config.speculative_config
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        longest_chunk=config.prefill_chunk_size,
        block_size=config.block_size,
        num_blocks=memory.num_kv_blocks,
        num_host_blocks=loaded.swap.num_host_blocks,
        num_idle_host_blocks=loaded.swap.num_idle_host_blocks,
        max_model_len=memory.max_model_len,
        num_speculative_tokens=config.num_speculative_tokens,
        adaptive_drafts=speculative is not None and speculative.draft_limits == ADAPTIVE,
        rows_per_weight_read=ROWS_PER_WEIGHT_READ[loaded.resolved.device.type],
        lookahead_slots=drafter.lookahead_slots,
        lookahead_tokens=drafter.lookahead_tokens,
        sliding_window=common_window((*loaded.caches, *loaded.drafter.caches)) or 0,
        enable_prefix_caching=config.enable_prefix_caching,
        # Prefill, decode and verify rows have equal bits (batch invariance). Of a drafter's
        # recurrent layers no window passes every position.
        cache_emitted_blocks=not bytes_per_slot(loaded.drafter.caches, 0),
        num_kept_states=memory.num_kept_states,
    )

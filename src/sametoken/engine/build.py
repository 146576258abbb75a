"""Build an engine: allocate memory for what was loaded, and assemble the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from subprocess import CalledProcessError

import torch

from sametoken.config import EngineConfig
from sametoken.distributed.ranks import Ranks, start_ranks
from sametoken.drafters.base import Drafter
from sametoken.drafters.combined import share_drafter
from sametoken.drafters.context import Coupling
from sametoken.engine.core import EngineCore
from sametoken.engine.fast_prompts import fast_form
from sametoken.engine.live_adapters import AdapterPlaces, LiveAdapters, load_factors
from sametoken.engine.load import Loaded, Requested, load, validate
from sametoken.engine.modes import without_modes
from sametoken.engine.resolve import (
    BUSY_ROWS,
    FREE_ROWS,
    ROUTING_BYTES,
    ROWS_PER_SPARSE_READ,
    ROWS_PER_WEIGHT_READ,
    STEP_BYTES,
)
from sametoken.engine.shared_weights import LeadingWeights, LoadAdapter
from sametoken.engine.sleep import memory_of
from sametoken.engine.step_memory import widened_bytes
from sametoken.engine.weights import Weights, weights_of
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.extraction.recording import NoExtraction, open_extraction
from sametoken.io.swap_file import SwapFile
from sametoken.ops.cache_types import (
    LayerCache,
    bytes_per_block,
    bytes_per_slot,
    common_window,
    state_bytes,
)
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.ops.step.types import Chances
from sametoken.runner.adapters import NO_STEP_ADAPTERS, AdaptedSteps, AdaptedTarget, StepAdapters
from sametoken.runner.async_output import OutputRing
from sametoken.runner.kept_states import KeptStateStore
from sametoken.runner.logits_processing import LogitsProcessing
from sametoken.runner.routed_experts import Recorder, recorder_of
from sametoken.runner.runner import EagerLauncher, Launcher, Runner, StepRunner
from sametoken.runner.step import Step
from sametoken.runner.swap import SwapStore
from sametoken.sampling.grammar_masks import SlotGrammars
from sametoken.scheduler.draft_limits import StepReads
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.scheduler import Scheduler
from sametoken.scheduler.swap_space import NO_FILE, BlockFile
from sametoken.state.caches import ModelCache
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.types.speculative_config import ADAPTIVE


def build_engine(
    config: EngineConfig, announce: Callable[[str], None] = lambda text: None
) -> EngineCore:
    """Load a target and its drafter, and allocate memory for them.

    Args:
        config: the user's options.
        announce: called with a line of text on each download and slow phase.

    Raises:
        ConfigError: options contradict each other, the model, or the memory; or this process is a
            fork of one that has built an engine.
        CheckpointError: a checkpoint is missing or broken.
        UnsupportedError: an architecture, method or device is not implemented.
        DrafterMismatchError: the drafter does not fit the target.
        EngineDeadError: another rank of the model failed for another reason.
    """
    return build_requested(validate(config, announce), announce)


@torch.inference_mode(mode=False)  # A caller's ends before what is allocated is written.
@without_modes()
def build_requested(requested: Requested, announce: Callable[[str], None]) -> EngineCore:
    """``build_engine`` for options that are validated."""
    extraction = open_extraction(
        requested.config.speculative_config,
        requested.path,
        requested.architecture,
        requested.needs.aux_layers,
        requested.dtype,
    )
    try:
        ranks = start_ranks(replace(requested.config, model=str(requested.path)), requested.device)
        with ranks.stopped_by_errors():
            with _errors_of_the_machine_explained():
                loaded = load(requested, ranks, extraction, announce)
                runner = _assemble(loaded, ranks, announce)
            scheduler = Scheduler(_limits(loaded, runner), _swap_file(loaded, runner))
            leader = ranks.lead(runner)
            shared, own = ranks.parallel.size > 1, _weights(loaded, ranks)
            weights = LeadingWeights(own, ranks) if shared else own
            memory, resolved = memory_of(runner, loaded.target, shared=shared), loaded.resolved
            upkeep = weights, memory, _live_adapters(loaded, ranks)
            return EngineCore(resolved, scheduler, leader, extraction, ranks, *upkeep)
    except BaseException:
        extraction.close()
        raise


def build_follower(
    config: EngineConfig, ranks: Ranks
) -> tuple[Runner, Weights, LoadAdapter | None]:
    """Build the runner of a follower rank, its weights, and what reads its shares of adapters.

    Raises:
        SametokenError: as in ``build_engine``.
    """
    requested = validate(config, _silent)
    with _errors_of_the_machine_explained():
        loaded = load(requested, ranks, NoExtraction(), _silent)
        factors = None if loaded.adapted is None else partial(load_factors, loaded.adapted)
        return _assemble(loaded, ranks, _silent), _weights(loaded, ranks), factors


def _weights(loaded: Loaded, ranks: Ranks) -> Weights:
    return weights_of(loaded.target, loaded.drafter, loaded.resolved, ranks.parallel)


def _live_adapters(loaded: Loaded, ranks: Ranks) -> LiveAdapters | None:
    if loaded.adapted is None:
        return None
    config = loaded.resolved.config
    names = [one.name for one in config.lora_modules]
    return AdapterPlaces(loaded.adapted, ranks, names, come=config.enable_lora)


@contextmanager
def _errors_of_the_machine_explained() -> Iterator[None]:
    """Turn an out-of-memory error into a ``ConfigError``, a missing compiler into its remedy."""
    try:
        with out_of_memory_as(
            ConfigError,
            "the model does not fit the memory",
            "lower num_kv_blocks, kv_cache_memory_bytes, max_num_seqs or max_model_len, "
            "or use a smaller model",
        ):
            yield
    except (RuntimeError, CalledProcessError) as error:
        first_line = str(error).partition("\n")[0]
        # On a GPU what launches a kernel is C, over Python's headers.
        if not isinstance(error, CalledProcessError) and "C compiler" not in first_line:
            raise
        raise UnsupportedError(
            f"Triton cannot compile what launches its kernels ({first_line})",
            "install a C compiler and Python's headers, as gcc and python3-dev",
        ) from error


def _silent(text: str) -> None:
    """Drop an announcement that rank 0 has already made."""


def _assemble(loaded: Loaded, ranks: Ranks, announce: Callable[[str], None]) -> StepRunner:
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
        model=experts.over(loaded.target),
        kv=kv,
        kernels=backend.model,
        ops=backend.step,
        table=table,
        drafter=share_drafter(drafter, config.num_speculative_tokens, ranks.parallel),
        results=ring.rows,
        all_states=loaded.all_states,
        fast_form=fast_form(config, loaded.caches),
        chances=_chances(loaded, table),
        parallel=ranks.parallel,
    )
    grammars = SlotGrammars(sequences)
    processing = LogitsProcessing(
        sequences, loaded.target, backend.model, table, grammars, ranks.parallel, mode
    )
    caches = (kv, *drafter.kv_caches)
    launcher, adapters = _launchers(loaded, ranks, step, processing, experts, announce)
    return StepRunner(
        step=step,
        processing=processing,
        launcher=launcher,
        swap=SwapStore(caches, loaded.swap.limit, pinned=on_gpu),
        kept_states=KeptStateStore(caches, memory.num_kept_states),
        stream=ranks.stream(device, steps),
        ring=ring,
        history=loaded.drafter.history,
        experts=experts,
        adapters=adapters,
    )


def _swap_file(loaded: Loaded, runner: StepRunner) -> BlockFile:
    directory = loaded.resolved.config.swap_dir
    if directory is None or not loaded.swap.num_file_blocks:
        return NO_FILE
    return SwapFile(directory, loaded.swap.num_file_blocks, runner.swap.host.buffer)


def _chances(loaded: Loaded, table: SamplingTable) -> Chances | None:
    speculative = loaded.resolved.config.speculative_config
    if speculative is None or speculative.synthetic_rates is None:
        return None
    return Chances.of(speculative.synthetic_rates, table.seed)


def _launchers(
    loaded: Loaded,
    ranks: Ranks,
    step: Step,
    processing: LogitsProcessing,
    experts: Recorder,
    announce: Callable[[str], None],
) -> tuple[Launcher, StepAdapters]:
    """What runs the target's steps, and those of requests with adapters."""
    adapted = loaded.adapted
    if adapted is None:
        (launcher,) = _launch([step], loaded, ranks, processing, announce)
        return launcher, NO_STEP_ADAPTERS
    by_slot = AdaptedSteps.slots(loaded.resolved.config.max_num_seqs, loaded.resolved.device)
    target = AdaptedTarget(experts.over(adapted.decoder), adapted.rows, by_slot)
    both = [step, replace(step, model=target, all_states=True)]
    launcher, own = _launch(both, loaded, ranks, processing, announce)
    return launcher, AdaptedSteps(by_slot, adapted.places, own)


def _launch(
    steps: Sequence[Step],
    loaded: Loaded,
    ranks: Ranks,
    processing: LogitsProcessing,
    announce: Callable[[str], None],
) -> Sequence[Launcher]:
    if loaded.resolved.device.type != "cuda":
        return [EagerLauncher(step) for step in steps]
    # Only CUDA builds of torch include Triton.
    from sametoken.engine.build_gpu import gpu_launchers

    return gpu_launchers(
        steps,
        processing,
        loaded.resolved,
        announce,
        ranks.broadcast_object,
        row_bytes=_reads(loaded).row_bytes,
        sparse=bool(loaded.mixtures),
    )


def _allocate(loaded: Loaded, caches: tuple[LayerCache, ...]) -> ModelCache:
    config = loaded.resolved.config
    return ModelCache.allocate(
        caches,
        num_blocks=loaded.memory.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        num_drafts=config.num_speculative_tokens,
        device=loaded.resolved.device,
    )


def _attach_drafter(loaded: Loaded, table: SamplingTable) -> Drafter:
    caches = loaded.drafter.caches
    cache = _allocate(loaded, caches) if caches else None
    return loaded.drafter.attach(cache, Coupling(loaded.backend.model.sample, table))


def _busy_rows(loaded: Loaded) -> int:
    """See ``SchedulerLimits``; of sparse models any step's rows share the read of all experts."""
    config, device = loaded.resolved.config, loaded.resolved.device
    return config.max_num_batched_tokens if loaded.mixtures else BUSY_ROWS[device.type]


def _reads(loaded: Loaded) -> StepReads:
    """A row is computed with the experts that it chooses; captured steps run all passes."""
    resolved, mixtures, drafter = loaded.resolved, loaded.mixtures, loaded.drafter
    device = resolved.device.type
    unbounded = [cache for cache in loaded.caches if common_window([cache]) is None]
    experts = sum(one.experts.nbytes for one in mixtures)
    chosen = sum(one.share * one.experts.nbytes for one in mixtures)
    whatever_rows = resolved.weights_bytes - experts
    multiplied = whatever_rows + chosen + widened_bytes(loaded.target)
    multiplied -= sum((1 - one.share) * widened_bytes(one.experts) for one in mixtures)
    step_bytes = STEP_BYTES[device]
    passes = 1 / (resolved.weights_bytes + step_bytes) if device == "cpu" else 0.0
    rows_per_read = (ROWS_PER_SPARSE_READ if mixtures else ROWS_PER_WEIGHT_READ)[device]
    return StepReads(
        weights_bytes=whatever_rows + step_bytes + len(mixtures) * ROUTING_BYTES[device],
        row_bytes=multiplied / rows_per_read,
        kv_bytes=bytes_per_block(unbounded, 1),
        state_bytes=state_bytes(unbounded),
        experts_bytes=experts,
        experts_share=chosen / experts if experts else 0.0,
        dead_rows=device == "cuda",
        free_rows=FREE_ROWS[device],
        draft_share=drafter.draft_bytes * passes,
        catch_up_share=drafter.catch_up_bytes * passes,
    )


def _limits(loaded: Loaded, runner: StepRunner) -> SchedulerLimits:
    config, memory, drafter = loaded.resolved.config, loaded.memory, runner.step.drafter
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
        adaptive_drafts=speculative is not None
        and speculative.proposes
        and speculative.draft_limits == ADAPTIVE,
        reads=_reads(loaded),
        busy_rows=_busy_rows(loaded),
        usual_rows=loaded.resolved.usual_rows,
        lookahead_slots=drafter.lookahead_slots,
        lookahead_tokens=drafter.lookahead_tokens,
        sliding_window=common_window((*loaded.caches, *loaded.drafter.caches)) or 0,
        enable_prefix_caching=config.enable_prefix_caching,
        # Prefill, decode and verify rows have equal bits (batch invariance). Of a drafter's
        # recurrent layers no window passes every position.
        cache_emitted_blocks=not bytes_per_slot(loaded.drafter.caches, 0),
        num_kept_states=memory.num_kept_states,
        captured_shapes=runner.launcher.shapes,
        fast_form=runner.step.fast_form,
    )

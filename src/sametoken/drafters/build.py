"""Build a drafter from a speculative config: load its weights first, attach its KV later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import Drafter, NoDrafter
from sametoken.drafters.combined import CascadeDrafter
from sametoken.drafters.context import Coupling
from sametoken.drafters.draft_model import DraftModelDrafter, require_fit
from sametoken.drafters.eagle import EagleDrafter, read_token_map
from sametoken.drafters.extract import extracted_layers
from sametoken.drafters.ngram import NgramDrafter
from sametoken.drafters.suffix import SuffixDrafter
from sametoken.errors import ConfigError, InvariantError, UnsupportedError
from sametoken.models.base import CausalLM, ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import load_model, read_config
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.dispatch import Backend
from sametoken.ops.lookup.suffix import Limits
from sametoken.state.caches import ModelCache
from sametoken.state.sequences import NO_HISTORY, TokenHistory
from sametoken.types.speculative_checks import EXTRACT, LOOKUPS

_Checkpoint = Eagle1Checkpoint | Eagle3Checkpoint | MTPCheckpoint

_CHECKPOINTS: dict[str, type[_Checkpoint]] = {
    "eagle": Eagle1Checkpoint,
    "eagle3": Eagle3Checkpoint,
    "mtp": MTPCheckpoint,
}

_HISTORY_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter with its weights loaded and its KV not allocated yet.

    Attributes:
        caches: the declarations of its layers; empty without a model.
        lookahead_slots: see ``Drafter``; known before it is attached.
        history: texts of earlier requests that it reads; written at admission.
        weights_bytes: bytes of its matrices, without those shared with the target.
    """

    caches: tuple[LayerCache, ...]
    lookahead_slots: int
    _attach: Callable[[ModelCache | None, Coupling], Drafter]
    history: TokenHistory = NO_HISTORY
    weights_bytes: int = 0

    def attach(self, kv_cache: ModelCache | None, coupling: Coupling) -> Drafter:
        """The drafter over the memory of ``caches``, which is None if there are none."""
        return self._attach(kv_cache, coupling)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a drafter runs.

    Attributes:
        backend, dtype, device: as the target's.
        max_model_len: the longest request, in tokens.
        max_positions: rows of rotary tables: ``max_model_len`` plus drafts.
        load_format: format of the drafter's checkpoint.
        target_path: the target's checkpoint, which may contain the drafter.
    """

    backend: Backend
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    max_positions: int
    load_format: str = "auto"
    target_path: Path = Path()


def required_aux_layers(
    spec: SpeculativeConfig | None,
    target: ModelConfig,
    target_path: Path = Path(),
    load_format: str = "auto",
) -> tuple[int, ...]:
    """The target's layers whose inputs the drafter reads; known before the target is loaded.

    Args:
        spec: the speculative config.
        target: the target's architecture.
        target_path, load_format: as in ``Placement``.

    Raises:
        CheckpointError: the head's config.json is missing or malformed, or the target's
            checkpoint has no head.
        UnsupportedError: the method or the head is not implemented.
        DrafterMismatchError: the head was trained for another target.
        ConfigError: a layer to extract does not exist, or a token map is given for a head with
            its own.
    """
    if spec is not None and spec.method == EXTRACT:
        return extracted_layers(spec, target.num_layers)
    if spec is None or spec.method not in _CHECKPOINTS:
        return ()
    return fitting_head(spec, target, target_path, load_format).aux_layers(target.num_layers)


def require_drafter_fits(
    spec: SpeculativeConfig | None, target: ModelConfig, max_model_len: int
) -> None:
    """Refuse a draft model or token map that does not fit the target, before weights are loaded.

    Raises:
        CheckpointError: the draft model's config is missing or broken.
        ConfigError: the token map cannot be read or has ids outside the target's vocabulary.
        DrafterMismatchError: another vocabulary, or fewer positions than ``max_model_len``.
    """
    if spec is not None and spec.token_map is not None:
        read_token_map(Path(spec.token_map), target.vocab_size)
    if spec is not None and spec.method == "draft_model":
        require_fit(read_config(Path(spec.model or "")), target, max_model_len)


def load_drafter(
    spec: SpeculativeConfig | None, target: CausalLM, placement: Placement
) -> LoadedDrafter:
    """Load the drafter of a method; refuse one that does not fit the target.

    Raises:
        CheckpointError: the drafter's checkpoint is missing or broken.
        UnsupportedError: the method or the checkpoint is not implemented.
        DrafterMismatchError: the drafter does not fit the target.
    """
    if spec is None or spec.method == EXTRACT:
        return LoadedDrafter((), 0, lambda kv_cache, coupling: NoDrafter())
    if spec.method in LOOKUPS:
        drafter, history = _lookup(spec.method, spec, placement, min_match=1)
        return LoadedDrafter((), 0, lambda kv_cache, coupling: drafter, history=history)
    load = _load_draft_model if spec.method == "draft_model" else _load_head
    model = load(spec, target, placement)
    if spec.cascade is None:
        return model
    lookup, history = _lookup(spec.cascade, spec, placement, min_match=spec.cascade_min_match)

    def attach(kv_cache: ModelCache | None, coupling: Coupling) -> Drafter:
        return CascadeDrafter(lookup, model.attach(kv_cache, coupling))

    return replace(model, _attach=attach, history=history)


def _lookup(
    method: str, spec: SpeculativeConfig, placement: Placement, *, min_match: int
) -> tuple[Drafter, TokenHistory]:
    """A drafter that matches text, and the history that it reads."""
    k, device = spec.num_speculative_tokens, placement.device
    if method == "ngram":
        shortest = max(spec.prompt_lookup_min, min_match)
        longest = max(spec.prompt_lookup_max, shortest)
        return NgramDrafter(k, shortest, longest, placement.backend.ngram), NO_HISTORY
    limits = Limits.of(
        k,
        depth=spec.suffix_decoding_max_tree_depth,
        min_match=min_match,
        factor=spec.suffix_decoding_max_spec_factor,
        min_prob=spec.suffix_decoding_min_token_prob,
        device=device,
    )
    max_texts = _HISTORY_BYTES // (placement.max_positions * torch.int64.itemsize)
    num_texts = min(spec.suffix_decoding_max_cached_requests, max_texts)
    history = TokenHistory.allocate(num_texts, placement.max_positions, device)
    return SuffixDrafter(limits, history, placement.backend.suffix), history


def _load_draft_model(
    spec: SpeculativeConfig, target: CausalLM, placement: Placement
) -> LoadedDrafter:
    k = spec.num_model_tokens
    model = load_model(
        Path(spec.model or ""),
        kernels=placement.backend.model,
        dtype=placement.dtype,
        device=placement.device,
        max_positions=placement.max_positions,
        load_format=placement.load_format,
    )
    require_fit(model.config, target.config, placement.max_model_len)

    def attach(kv_cache: ModelCache | None, coupling: Coupling) -> Drafter:
        return DraftModelDrafter(model, _require_memory(kv_cache), k, coupling)

    return LoadedDrafter(model.caches, k - 1, attach, weights_bytes=model.weights_bytes)


def _load_head(spec: SpeculativeConfig, target: CausalLM, placement: Placement) -> LoadedDrafter:
    k = spec.num_model_tokens
    if not isinstance(target, Decoder):
        raise UnsupportedError(
            f"{target.config.architecture} keeps no states for a draft head",
            "use another speculative method",
        )
    checkpoint = fitting_head(spec, target.config, placement.target_path, placement.load_format)
    token_ids = None
    if spec.token_map is not None:
        token_ids = read_token_map(Path(spec.token_map), target.config.vocab_size)
        token_ids = token_ids.to(placement.device)
    head = checkpoint.load(
        target,
        kernels=placement.backend.model,
        dtype=placement.dtype,
        device=placement.device,
        max_positions=placement.max_positions,
        token_ids=token_ids,
        quantize_fp8=spec.quantization is not None,
    )

    def attach(kv_cache: ModelCache | None, coupling: Coupling) -> Drafter:
        return EagleDrafter(head, _require_memory(kv_cache), k, coupling)

    shared = {id(target.embedding), id(target.head)}
    own = (one.nbytes for one in (head.embedding, head.lm_head) if id(one) not in shared)
    return LoadedDrafter(head.caches, max(k - 2, 0), attach, weights_bytes=head.nbytes + sum(own))


def fitting_head(
    spec: SpeculativeConfig, target: ModelConfig, target_path: Path, load_format: str
) -> _Checkpoint:
    """The checkpoint of a method's head, with its config read and its weights not.

    Arguments and errors as in ``required_aux_layers``.
    """
    directory = target_path if spec.model is None else Path(spec.model)
    checkpoint = _CHECKPOINTS[spec.method](directory, load_format=load_format)
    checkpoint.require_fit(target)
    if spec.token_map is not None:
        _require_whole_vocabulary(checkpoint)
    return checkpoint


def _require_whole_vocabulary(checkpoint: _Checkpoint) -> None:
    if isinstance(checkpoint, Eagle3Checkpoint) and checkpoint.config.has_token_map:
        own, whole = checkpoint.config.draft_vocab_size, checkpoint.config.layer.vocab_size
        raise ConfigError(
            f"the EAGLE-3 head proposes {own} of {whole} tokens by a map of its own",
            'leave "token_map" out',
        )


def _require_memory(kv_cache: ModelCache | None) -> ModelCache:
    if kv_cache is None:
        raise InvariantError("a drafter with KV was attached without memory")
    return kv_cache

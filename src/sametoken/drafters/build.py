"""From a speculative config to a drafter: load its weights first, attach its KV later.

The table of methods (``types.speculative_methods``) says what loads each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from sametoken.config import DUMMY, SpeculativeConfig
from sametoken.drafters import draft_model, eagle
from sametoken.drafters.base import (
    Drafter,
    DrafterNeeds,
    LoadedDrafter,
    NoDrafter,
    Placement,
    named,
)
from sametoken.drafters.combined import CascadeDrafter
from sametoken.drafters.context import Coupling
from sametoken.drafters.extract import extracted_layers
from sametoken.drafters.heads import fitting_head, read_token_map
from sametoken.models.base import CausalLM, ModelConfig
from sametoken.models.load.huggingface import open_weights
from sametoken.models.loader import open_checkpoint
from sametoken.ops.cache_types import divided
from sametoken.state.caches import ModelCache
from sametoken.types.speculative_methods import HEADS, TABLE, Kind


def needs_of_drafter(
    spec: SpeculativeConfig | None,
    target: ModelConfig,
    dtype: torch.dtype,
    target_path: Path = Path(),
    load_format: str = "auto",
    size: int = 1,
) -> DrafterNeeds:
    """What the drafter needs; known before the target is loaded.

    Args:
        spec: the speculative config.
        target: the target's architecture.
        dtype: of the weights.
        target_path, load_format: as in ``Placement``.
        size: the ranks that share the target.

    Raises:
        CheckpointError: the drafter's config.json is missing or malformed, or the target's
            checkpoint has no head.
        UnsupportedError: the method or the drafter is not implemented.
        DrafterMismatchError: the head was trained for another target.
        ConfigError: a layer to extract does not exist, a token map is given for a head with its
            own, or a head makes fewer drafts.
    """
    if spec is None:
        return DrafterNeeds()
    kind = TABLE[spec.method].kind
    if kind is Kind.RECORDER:
        return DrafterNeeds(extracted_layers(spec, target.num_layers))
    if kind is Kind.MODEL:
        return draft_model.needs_of(spec, dtype, load_format, size)
    if kind is Kind.HEAD:
        head = fitting_head(spec, target, target_path, load_format)
        num_ranks = size if head.is_divisible(size) else 1
        caches = divided(head.caches(dtype), num_ranks)
        lookahead = eagle.lookahead_slots(spec.num_model_tokens) if caches else 0
        return DrafterNeeds(head.aux_layers(target.num_layers), caches, lookahead, num_ranks)
    return DrafterNeeds()


def require_token_map(spec: SpeculativeConfig | None, target: ModelConfig) -> None:
    """Refuse a token map that does not fit the target, before weights are loaded.

    Raises:
        ConfigError: it cannot be read or has ids outside the target's vocabulary.
    """
    if spec is not None and spec.token_map is not None:
        read_token_map(Path(spec.token_map), target.vocab_size)


def require_drafter_files(spec: SpeculativeConfig | None, load_format: str) -> None:
    """Refuse a drafter without its weights, or with a file that is cut off, before any are read.

    Raises:
        CheckpointError, UnsupportedError: as ``load_drafter``.
    """
    if spec is None or spec.model is None or load_format == DUMMY:
        return
    if TABLE[spec.method].kind is Kind.MODEL:
        open_checkpoint(spec.model, load_format=load_format).open_tensors()
    elif spec.method in HEADS:
        open_weights(Path(spec.model))


def load_drafter(
    spec: SpeculativeConfig | None, target: CausalLM, placement: Placement
) -> LoadedDrafter:
    """Load the drafter of a method; refuse one that does not fit the target.

    Raises:
        CheckpointError: the drafter's checkpoint is missing or broken.
        UnsupportedError: the method or the checkpoint is not implemented.
        DrafterMismatchError: the drafter does not fit the target.
    """
    if spec is None:
        return LoadedDrafter((), lambda kv_cache, coupling: NoDrafter())
    own = _loaded(spec.method, spec, target, placement)
    if spec.cascade is None:
        return own
    lookup = _loaded(spec.cascade, spec, target, placement)

    def attach(kv_cache: ModelCache | None, coupling: Coupling) -> Drafter:
        return CascadeDrafter(lookup.attach(None, coupling), own.attach(kv_cache, coupling))

    return replace(own, attach=attach, history=lookup.history)


def _loaded(
    method: str, spec: SpeculativeConfig, target: CausalLM, placement: Placement
) -> LoadedDrafter:
    loaded: LoadedDrafter = named(TABLE[method].load)(spec, target, placement)
    return loaded

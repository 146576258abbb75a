"""The drafter protocol, the null drafter, and what a method loads before its KV is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.drafters.context import Coupling, DraftContext
from sametoken.errors import InvariantError
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.base import CausalLM
from sametoken.models.load.sources import TensorSource
from sametoken.ops.backend import Kernels
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.dispatch import Backend
from sametoken.ops.step.types import Chains
from sametoken.ops.weight import Weight
from sametoken.state.caches import ModelCache
from sametoken.state.sequences import NO_HISTORY, TokenHistory


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of the step's B scheduled requests.

    Attributes:
        draft_ids: [B, k] int64; entries from ``num_drafts`` on are undefined but valid ids.
        num_drafts: [B] int64, 0..k.
    """

    draft_ids: Tensor
    num_drafts: Tensor


class Drafter(Protocol):
    """Proposes drafts after each step, starting at the committed length; by default without KV.

    Attributes:
        kv_caches: the drafter's KV memory, addressed by the slots' block tables; swapped out and
            in with the target's.
        lookahead_slots: number of positions from ``num_tokens`` on that it may write KV to.
        lookahead_tokens: number of tokens after position p that its KV at p depends on; prefix
            cache keys cover that many more tokens.
    """

    kv_caches: tuple[ModelCache, ...] = ()
    lookahead_slots: int = 0
    lookahead_tokens: int = 0

    def propose(self, context: DraftContext) -> Drafts:
        """Propose drafts for every request; requests that do not sample must get 0.

        A drafter with KV also computes the live rows of requests that do not sample (prefill
        chunks). One that runs a pass for each draft proposes at most ``context.num_wanted``.
        """
        ...


class NoDrafter(Drafter):
    """Plain decoding: the same step with k = 0."""

    def propose(self, context: DraftContext) -> Drafts:
        """No drafts for any request."""
        batch, k = context.slots.shape[0], context.num_speculative_tokens
        draft_ids = context.slots.new_zeros(batch, k)
        # With k = 0 the step's own counts are all 0.
        num_drafts = torch.zeros_like(context.slots) if k else context.x.num_drafts
        return Drafts(draft_ids, num_drafts)


class DrafterAround:
    """A drafter that has the KV of another one, ``inner``, and calls it."""

    def __init__(self, inner: Drafter) -> None:
        self.kv_caches = inner.kv_caches
        self.lookahead_slots = inner.lookahead_slots
        self.lookahead_tokens = inner.lookahead_tokens
        self._inner = inner


def drafts_of(context: DraftContext, chains: Chains, tokens: list[Tensor]) -> Drafts:
    """Drafts with ``tokens[i]`` as i-th tokens of the chains; none for other requests.

    Args:
        context: the step's context.
        chains: the requests that sample.
        tokens: one [R] int64 for each draft position, one or more.
    """
    if chains.owner is None:
        return stacked_drafts(context, tokens)
    k = context.num_speculative_tokens
    draft_ids = tokens[0].new_zeros(context.slots.shape[0], k)
    draft_ids[chains.owner, : len(tokens)] = torch.stack(tokens, dim=1)
    return Drafts(draft_ids, context.samples * len(tokens))


def stacked_drafts(context: DraftContext, tokens: list[Tensor]) -> Drafts:
    """Drafts of requests that all have a chain; each of ``tokens`` is [B] int64."""
    draft_ids, num_drafts = context.ops.stacked(tokens, context.samples)
    if missing := context.num_speculative_tokens - len(tokens):
        draft_ids = torch.nn.functional.pad(draft_ids, (0, missing))
    return Drafts(draft_ids, num_drafts)


#: Loads a drafter's model again: these tensors, over this target, packed by these kernels.
Reload = Callable[[TensorSource, CausalLM, Kernels], object]


@dataclass(frozen=True, slots=True)
class SharedHead:
    """The lm_head of a draft head that is its target's: whole, cut to a token map, or rounded.

    Attributes:
        weight: it, with its memory or that of the target's.
        made_of: another one, of this target, packed by these kernels.
    """

    weight: Weight
    made_of: Callable[[CausalLM, Kernels], Weight]


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter reads of the target and keeps, known before anything is loaded.

    Attributes:
        aux_layers: the target's layers whose inputs it reads.
        caches: the declarations of its own layers, on one rank; empty without a model.
        lookahead_slots: see ``Drafter``.
        num_ranks: the ranks that divide it; 1: each of them has all of it.
    """

    aux_layers: tuple[int, ...] = ()
    caches: tuple[LayerCache, ...] = ()
    lookahead_slots: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter with its weights loaded and its KV not allocated yet.

    Attributes:
        caches: the declarations of its layers; empty without a model.
        attach: makes the drafter over the memory of ``caches``, which is None if there are none.
        history: texts of earlier requests that it reads; written at admission.
        weights_bytes: bytes of its matrices, without those shared with the target.
        draft_bytes: bytes of matrices that the pass for a draft reads, shared ones included.
        catch_up_bytes: those of them that a step reads even if no draft is wanted.
        model: the model or head that drafts; None without any.
        reload: loads another one like ``model``; None without any.
        in_target: prefix of its tensors where they are a part of the target's checkpoint.
        shared_head: the lm_head of ``model``, if it is the target's.
    """

    caches: tuple[LayerCache, ...]
    attach: Callable[[ModelCache | None, Coupling], Drafter]
    history: TokenHistory = NO_HISTORY
    weights_bytes: int = 0
    draft_bytes: int = 0
    catch_up_bytes: int = 0
    model: object = None
    reload: Reload | None = None
    in_target: str | None = None
    shared_head: SharedHead | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a drafter runs.

    Attributes:
        backend, dtype, device: as the target's.
        max_model_len: the longest request, in tokens.
        max_positions: rows of rotary tables: ``max_model_len`` plus ``DRAFT_POSITIONS``.
        load_format: format of the drafter's checkpoint.
        target_path: the target's checkpoint, which may contain the drafter.
        parallel: the ranks that divide the drafter's model.
    """

    backend: Backend
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    max_positions: int
    load_format: str = "auto"
    target_path: Path = Path()
    parallel: TensorParallel = SINGLE_RANK


def require_memory(kv_cache: ModelCache | None) -> ModelCache:
    """The memory of a drafter that keeps KV.

    Raises:
        InvariantError: it was attached without.
    """
    if kv_cache is None:
        raise InvariantError("a drafter with KV was attached without memory")
    return kv_cache


def named(reference: str) -> Any:
    """What a "module:name" of the table of methods stands for."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)

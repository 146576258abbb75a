"""A smaller model of the same tokens as drafter."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import (
    Drafter,
    DrafterNeeds,
    Drafts,
    LoadedDrafter,
    NoDrafter,
    Placement,
    drafts_of,
    require_memory,
)
from sametoken.drafters.context import Coupling, DraftContext
from sametoken.models.base import CausalLM
from sametoken.models.decoder import Decoder
from sametoken.models.load.quantization import read_quantization
from sametoken.models.load.sources import TensorSource
from sametoken.models.load.weights import WeightReader
from sametoken.models.loader import load_model, read_config
from sametoken.models.registry import is_divisible, model_class
from sametoken.ops.backend import Kernels
from sametoken.ops.cache_types import divided
from sametoken.ops.step.types import Chains
from sametoken.state.caches import ModelCache


class DraftModelDrafter:
    """Runs a draft model over the slots' block tables.

    Every request computes positions ``num_computed .. end - 1``. One that samples also runs its
    newest token, at ``end``, whose logits give draft 1; then one row per further draft. Each
    position below ``end`` is recomputed from committed tokens before it is read, so KV of rejected
    drafts is never read (tests/unit/drafters/test_draft_model.py).

    ``lookahead_tokens`` is 0: the KV at p depends on tokens up to p, and prefill chunks write
    nothing at ``end`` or above, so a block of committed tokens matches its prefix-cache key.

    Args:
        model: the draft model.
        kv_cache: its KV, with the target's number and size of blocks.
        k: drafts per step.
        coupling: chooses tokens.
        vocab_size: the target's, where one of the two is padded further; None: the draft model's.
        max_model_len: the longest request, in tokens; where it has more than the draft model has
            positions, there are no drafts. 0: every request fits.
    """

    lookahead_tokens = 0

    def __init__(
        self,
        model: CausalLM,
        kv_cache: ModelCache,
        k: int,
        coupling: Coupling,
        vocab_size: int | None = None,
        max_model_len: int = 0,
    ) -> None:
        self.kv_caches: tuple[ModelCache, ...] = (kv_cache,)
        self.lookahead_slots = lookahead_slots(k)
        self._model = model
        self._k = k
        self._coupling = coupling
        self._last_id = model.config.vocab_size - 1
        self._vocab_size = vocab_size or model.config.vocab_size
        num_positions = model.config.max_position_embeddings
        self._num_positions = num_positions if num_positions < max_model_len else None

    def propose(self, context: DraftContext) -> Drafts:
        """The wanted drafts for every request that samples; the others only catch up."""
        (kv_cache,) = self.kv_caches
        live = context.catch_up_with_newest()
        chains, token_ids = live.chains, live.token_ids
        if self._vocab_size - 1 > self._last_id:
            # Padding of the target alone: no text has it, and any row of the embedding will do.
            token_ids = token_ids.clamp(max=self._last_id)
        # Rows outside chains.last are run only for their KV.
        hidden = self._model.forward(token_ids, live.rows, kv_cache, chains.last).last
        wanted = min(self._k, context.num_wanted)
        if not wanted or not chains.last.index.numel():
            return NoDrafter().propose(context)
        drafts = [self._choose(hidden, chains)]
        while len(drafts) < wanted:
            chains = context.advanced(chains)
            hidden = self._model.forward(drafts[-1], chains.rows, kv_cache).last
            drafts.append(self._choose(hidden, chains))
        found = drafts_of(context, chains, drafts)
        if self._num_positions is None:
            return found
        # Rows beyond are run with the others, and give no drafts.
        fits = context.num_tokens + wanted - 1 <= self._num_positions
        return Drafts(found.draft_ids, found.num_drafts * fits)

    def _choose(self, hidden: Tensor, chains: Chains) -> Tensor:
        logits = self._model.compute_logits(hidden)
        if self._last_id >= self._vocab_size:
            logits[:, self._vocab_size :] = -torch.inf
        return self._coupling.choose(logits, chains.rows.slots, chains.following)


def lookahead_slots(k: int) -> int:
    """See ``Drafter``: drafts 1 .. k - 1 are run at ``num_tokens`` and above."""
    return k - 1


def needs_of(
    spec: SpeculativeConfig, dtype: torch.dtype, load_format: str, size: int
) -> DrafterNeeds:
    """What ``load``'s drafter needs, from the draft model's config alone.

    Arguments as in ``drafters.build.needs_of_drafter``.

    Raises:
        CheckpointError, UnsupportedError: as ``load``.
    """
    path = Path(spec.model or "")
    config = read_config(path, load_format=load_format)
    family = model_class(config.architecture)
    quantization = read_quantization(config.extra, str(path))
    num_ranks = size if is_divisible(family, config, quantization, size) else 1
    caches = divided(family.caches_of(config, dtype, str(path)), num_ranks)
    return DrafterNeeds((), caches, lookahead_slots(spec.num_model_tokens), num_ranks)


def load(spec: SpeculativeConfig, target: CausalLM, placement: Placement) -> LoadedDrafter:
    """See ``types.speculative_methods.Method``.

    Raises:
        CheckpointError: the checkpoint is missing or broken.
        UnsupportedError: the checkpoint is not implemented.
    """
    k = spec.num_model_tokens
    model = load_model(
        Path(spec.model or ""),
        kernels=placement.backend.model,
        dtype=placement.dtype,
        device=placement.device,
        max_positions=placement.max_positions,
        load_format=placement.load_format,
        parallel=placement.parallel,
    )

    def attach(kv_cache: ModelCache | None, coupling: Coupling) -> Drafter:
        sizes = target.config.vocab_size, placement.max_model_len
        return DraftModelDrafter(model, require_memory(kv_cache), k, coupling, *sizes)

    def reload(source: TensorSource, target: CausalLM, kernels: Kernels) -> Decoder:
        formats, where = read_quantization(model.config.extra, source.location), placement
        reader = WeightReader(
            source, kernels, where.dtype, where.device, where.parallel, quantization=formats
        )
        return model.reloaded(reader)

    layers_bytes = sum(layer.nbytes for layer in model.layers)
    return LoadedDrafter(
        model.caches,
        attach,
        weights_bytes=model.weights_bytes,
        draft_bytes=layers_bytes + model.head.nbytes,
        catch_up_bytes=layers_bytes,
        model=model,
        reload=reload,
    )

"""The target's hidden states for batches: kept in memory, computed again, or from shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.errors import ConfigError
from sametoken.extraction.shards import ExtractedStates
from sametoken.models.base import ModelConfig
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.train.batches import Batch, Batches
from sametoken.train.target import FrozenTarget, TargetStates, rms_norm
from sametoken.train.text import Sequences, is_trainable
from sametoken.types.units import counted, in_units

# Tokens per pass of ``keep``: they fill a GPU, and fit a CPU's cache.
_GPU_PASS_TOKENS, _CPU_PASS_TOKENS = 32768, 2048


class BatchStates(NamedTuple):
    """States of a batch.

    Attributes:
        auxiliary: [B, L, num_aux * hidden], what the head reads.
        last: [B, L, hidden], after the final norm.
        greedy: [B, L] int64, the target's most likely token after each position.
    """

    auxiliary: Tensor
    last: Tensor
    greedy: Tensor


class Target(Protocol):
    """A frozen target."""

    @property
    def config(self) -> ModelConfig:
        """Its architecture."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[V, hidden]."""
        ...

    @property
    def head(self) -> Tensor:
        """[V, hidden]; with tied embeddings the same tensor."""
        ...

    def states(self, token_ids: Tensor) -> TargetStates:
        """[B, L] int64 to hidden states; padding on the right changes no row before it."""
        ...


class StateSource(Protocol):
    """A source of states."""

    def of(self, batch: Batch) -> BatchStates:
        """The states of a batch; padding rows hold arbitrary finite values."""
        ...


@dataclass(frozen=True, slots=True)
class RunAnew:
    """States from a forward pass of the target for every batch."""

    target: Target

    def of(self, batch: Batch) -> BatchStates:
        """See ``StateSource``."""
        found = self.target.states(batch.token_ids)
        return BatchStates(found.auxiliary, found.last, greedy_tokens(found.last, self.target.head))


@dataclass(frozen=True, slots=True)
class Kept:
    """States in memory: [N, ...] each, by index in ``Sequences.token_ids``."""

    states: BatchStates

    def of(self, batch: Batch) -> BatchStates:
        """See ``StateSource``."""
        return BatchStates(*(part[batch.places] for part in self.states))


def keep(target: Target, sequences: Sequences, num_aux: int) -> Kept:
    """Run every sequence once and keep its states on the target's device."""
    hidden, num_tokens = target.config.hidden_size, sequences.token_ids.shape[0]
    device = target.embedding.device
    kept = BatchStates(
        target.embedding.new_empty(num_tokens, num_aux * hidden),
        target.embedding.new_empty(num_tokens, hidden),
        torch.empty(num_tokens, dtype=torch.int64, device=device),
    )
    everything = list(range(len(sequences)))
    at_once = _GPU_PASS_TOKENS if device.type == "cuda" else _CPU_PASS_TOKENS
    batches = Batches(sequences, everything, batch_tokens=at_once, seed=0, device=device)
    run = RunAnew(target)
    for step in range(len(batches)):
        batch = batches.at(step)
        offsets = torch.arange(batch.places.shape[1], device=device)
        own = offsets[None] < batch.lengths.to(device)[:, None]
        for part, found in zip(kept, run.of(batch), strict=True):
            part[batch.places[own]] = found[own]
    return Kept(kept)


def kept_bytes(sequences: Sequences, target: Target, num_aux: int) -> int:
    """Bytes that ``keep`` would allocate."""
    size = target.embedding.dtype.itemsize
    per_token = (num_aux + 1) * target.config.hidden_size * size + 8
    return int(sequences.token_ids.shape[0]) * per_token


@dataclass(frozen=True, slots=True)
class LayerStates:
    """A run of ``extract_hidden_states``, and the indices of the needed layers in it."""

    extracted: ExtractedStates
    places: list[int]


def open_states(
    directories: Sequence[Path], config: ModelConfig, aux_layers: tuple[int, ...], max_length: int
) -> tuple[LayerStates, ...]:
    """What one or more runs of ``extract_hidden_states`` wrote for a target; no state is read.

    Raises:
        ConfigError: they belong to another target, hold no answer, or lack a layer that the head
            reads or the stream that enters the final norm.
        CheckpointError: a manifest is missing or malformed.
    """
    needed = (*aux_layers, config.num_layers)
    extracted = [ExtractedStates(directory) for directory in directories]
    opened = tuple(LayerStates(one, _places_of(one, config, needed)) for one in extracted)
    entries = [entry for one in extracted for entry in one.entries]
    if not any(is_trainable(one.prompt_len, min(one.num_rows + 1, max_length)) for one in entries):
        raise ConfigError(
            "the states hold no sequence with an answer of two tokens within max_length, or of "
            "three to an empty prompt",
            "extract longer answers, or raise max_length",
        )
    return opened


def read_states(
    opened: Sequence[LayerStates], target: FrozenTarget, max_length: int
) -> tuple[Sequences, Kept]:
    """The sequences and states of a target.

    Raises:
        ConfigError: the target's device has no memory for the states.
        CheckpointError: a shard is damaged.
    """
    hidden, num_aux = target.config.hidden_size, len(opened[0].places) - 1
    entries = [entry for one in opened for entry in one.extracted.entries]
    most = sum(min(entry.num_rows + 1, max_length) for entry in entries)
    needed = most * (num_aux + 1) * hidden * target.embedding.dtype.itemsize
    with out_of_memory_as(
        ConfigError,
        f"the states of {most} tokens take {in_units(needed)}, which the device has not",
        "give fewer directories of states, or lower max_length",
    ):
        # The last token of a sequence has no state, and no draft needs one.
        auxiliary = target.embedding.new_zeros(most, num_aux * hidden)
        last = target.embedding.new_zeros(most, hidden)
    pairs, first = [], 0
    for one in opened:
        for index in range(len(one.extracted)):
            sequence = one.extracted[index]
            token_ids = sequence.token_ids[:max_length].tolist()
            if not is_trainable(sequence.prompt_len, len(token_ids)):
                continue
            pairs.append((token_ids, sequence.prompt_len))
            rows = slice(first, first + len(token_ids) - 1)
            states = sequence.hidden_states[: len(token_ids) - 1, one.places].to(last)
            auxiliary[rows] = states[:, :-1].flatten(1)
            last[rows] = rms_norm(states[:, -1], target.final_norm, target.config.rms_norm_eps)
            first += len(token_ids)
    last = last[:first]
    kept = BatchStates(auxiliary[:first], last, greedy_tokens(last, target.head))
    return Sequences.of(pairs), Kept(kept)


def _places_of(
    extracted: ExtractedStates, config: ModelConfig, needed: tuple[int, ...]
) -> list[int]:
    """Indices of the needed layers among the extracted ones."""
    source = extracted.manifest.source
    found = (source.vocab_size, source.hidden_size, source.num_hidden_layers)
    if found != (config.vocab_size, config.hidden_size, config.num_layers):
        raise ConfigError(
            f"the states are of a target with {found} tokens, hidden elements and layers",
            "extract them with the target that is trained for",
        )
    layers = source.eagle_aux_hidden_state_layer_ids
    if not set(needed) <= set(layers) or not len(extracted):
        raise ConfigError(
            f"the states hold {counted(len(extracted), 'sequence')} of layers {layers}, training "
            f"needs layers {needed}",
            f'extract with "eagle_aux_hidden_state_layer_ids": {sorted(set(needed))}',
        )
    return [layers.index(layer) for layer in needed]


def greedy_tokens(last: Tensor, head: Tensor) -> Tensor:
    """[..., hidden] to the most likely token of each, int64; a few rows at a time."""
    rows = last.reshape(-1, last.shape[-1])
    chunks = [(part @ head.T).float().argmax(-1) for part in torch.split(rows, 4096)]
    return torch.cat(chunks).reshape(last.shape[:-1])

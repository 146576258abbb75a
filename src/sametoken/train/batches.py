"""Which sequences make up the batch of a step: a function of lengths, seed and step alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.train.compute import generator_of
from sametoken.train.text import Sequences

# Lengths are padded to multiples of it, so that few shapes occur.
GRAIN = 32


def padded_length(length: int) -> int:
    """What a longest sequence of ``length`` tokens is padded to."""
    return -(-length // GRAIN) * GRAIN


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side, padded on the right.

    Attributes:
        places: [B, L] int64, of each token in ``Sequences.token_ids``; padding repeats the
            sequence's last.
        token_ids: [B, L] int64.
        lengths: [B] int64, on the host.
        prompt_lens: [B] int64, on the host.
    """

    places: Tensor
    token_ids: Tensor
    lengths: Tensor
    prompt_lens: Tensor


class Batches:
    """Endless batches over epochs, each a shuffle of all sequences.

    Sequences of like length go together. Everything but indices stays on one device.

    Args:
        sequences: what to draw from.
        indices: those of them that are used.
        batch_tokens: tokens of a batch at most, padding counted; a longer sequence is alone.
        seed: of the shuffles.
        device: where batches are made.
    """

    def __init__(
        self,
        sequences: Sequences,
        indices: list[int],
        *,
        batch_tokens: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._indices = torch.tensor(indices, dtype=torch.int64)
        self._lengths = sequences.lengths[self._indices]
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._device = device
        self._sequences = sequences
        self._token_ids = sequences.token_ids.to(device)
        self._epoch, self._groups = 0, self._shuffled(0)

    def __len__(self) -> int:
        """Batches of an epoch: the same in every one."""
        return len(self._groups)

    def at(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs."""
        epoch, index = divmod(step, len(self))
        if epoch != self._epoch:
            self._epoch, self._groups = epoch, self._shuffled(epoch)
        return self.of(self._groups[index])

    def of(self, indices: Tensor) -> Batch:
        """The given sequences, [B] int64, as a batch."""
        starts = self._sequences.starts[indices]
        lengths = self._sequences.starts[indices + 1] - starts
        offsets = torch.arange(padded_length(int(lengths.max())))[None]
        places = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
        places = upload(places, self._device)
        prompt_lens = self._sequences.prompt_lens[indices]
        return Batch(places, self._token_ids[places], lengths, prompt_lens)

    def _shuffled(self, epoch: int) -> list[Tensor]:
        generator = generator_of(self._seed, "epoch", epoch)
        order = torch.randperm(len(self._indices), generator=generator)
        padded = (self._lengths[order] + GRAIN - 1) // GRAIN
        groups: list[Tensor] = []
        for size in torch.unique(padded).tolist():
            alike = self._indices[order[padded == size]]
            groups += torch.split(alike, max(self._batch_tokens // (size * GRAIN), 1))
        return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of a batch from which a head drafts what an engine would judge.

    Row r of a sequence is the last whose token's successor is known: it drafts the token at
    r + 2 and those after it. The first is that of the first step after the prompt.

    Attributes:
        flat: [M] int64, indices into [B * L]; the rows of a sequence follow one another.
        left: [M] int64, how many tokens from r + 2 on the sequence has: at least 1.
        counts: rows of each sequence.
    """

    flat: Tensor
    left: Tensor
    counts: list[int]

    @classmethod
    def of(cls, batch: Batch) -> DraftRows:
        """Those of a batch."""
        first = (batch.prompt_lens - 1).clamp(min=0)
        counts = (batch.lengths - 2 - first).clamp(min=0)
        owners = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
        places = torch.arange(owners.shape[0]) - (counts.cumsum(0) - counts)[owners]
        rows = first[owners] + places
        device = batch.places.device
        flat = upload(owners * batch.places.shape[1] + rows, device)
        left = upload(batch.lengths[owners] - 2 - rows, device)
        return cls(flat, left, counts.tolist())

    def goes_on(self, agrees: Tensor, k: int) -> Tensor:
        """[k, M] bool, whether the text lets a chain from each row reach each draft.

        Args:
            agrees: [M] bool, whether the text goes on from a row as the target would.
            k: drafts of a chain.
        """
        reached = self.left > torch.arange(k, device=self.left.device)[:, None]
        for draft in range(1, k):
            # A chain gets past row r + draft - 1 on its way to the draft from row r + draft.
            before = agrees[draft - 1 : -1]
            reached[draft, : before.shape[0]] &= before
        return reached


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, without waiting for it."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

"""The sequences of each step's batch: a function of lengths, seed and step alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.train.compute import generator_of
from sametoken.train.text import Sequences

# Lengths are padded to multiples of this, so that few shapes occur.
GRAIN = 32


def padded_length(length: int) -> int:
    """The width of a batch whose longest sequence has ``length`` tokens."""
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

    Sequences of similar length form a batch. Tokens stay on the device; a step sends indices.

    Args:
        sequences: the text.
        indices: the sequences to draw from.
        batch_tokens: most tokens of a batch, padding included; a longer sequence is a batch alone.
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
        """Batches of an epoch, the same number in each."""
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
    """The rows of a batch from which a head drafts tokens that an engine would verify.

    At row r of a sequence the token at r + 1 is known, and the head drafts those from r + 2 on.
    The first row is the one that the first step after the prompt drafts from.

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
        """The draft rows of a batch."""
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
            agrees: [M] bool, whether the text continues after a row with the target's token.
            k: drafts of a chain.
        """
        reached = self.left > torch.arange(k, device=self.left.device)[:, None]
        for draft in range(1, k):
            # A chain passes row r + draft - 1 before it reaches the draft from row r + draft.
            before = agrees[draft - 1 : -1]
            reached[draft, : before.shape[0]] &= before
        return reached


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting for the copy."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

"""Packed sequences as rows of one forward pass, and cache memory for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from operator import index

import torch
from torch import Tensor

from sametoken.errors import RequestError
from sametoken.exact.kernels import RecordedKV
from sametoken.exact.recurrent import RecordedMemory
from sametoken.ops.backend import AttentionRows, LayerKV, RowRuns
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.model.recurrent.rule import LayerMemory
from sametoken.state.caches import ModelCache
from sametoken.state.upload import upload
from sametoken.types.units import counted


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Whole sequences of any lengths, one after the other; each has a slot and blocks of its own.

    Attributes:
        lengths: of the sequences, T in total.
        token_ids: [T] int64.
        rows: their slots, positions and KV addresses.
        places: [T] int64 each, the blocks of these addresses, and offsets in them.
        scored: [L] int64, the rows that predict the scored tokens.
        chosen: [L] int64, the scored tokens.
        num_scored: by sequence, L in total.
        num_blocks, block_size: of the KV memory, without the reserved block.
    """

    lengths: tuple[int, ...]
    token_ids: Tensor
    rows: AttentionRows
    places: tuple[Tensor, Tensor]
    scored: Tensor
    chosen: Tensor
    num_scored: tuple[int, ...]
    num_blocks: int
    block_size: int

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        block_size: int,
        device: torch.device,
    ) -> PackedSequences:
        """Lay out sequences that ``checked_sequences`` gives."""
        lengths = tuple(map(len, sequences))
        firsts = (0, *accumulate(lengths))
        counts = [-(-length // block_size) for length in lengths]
        first_blocks = (0, *accumulate(counts))
        num_blocks, width = first_blocks[-1], max(counts)
        table = [
            [*range(first, last), *[num_blocks] * (width - (last - first))]
            for first, last in pairwise(first_blocks)
        ]
        places = [(slot, at) for slot, length in enumerate(lengths) for at in range(length)]
        slots, positions = upload(places, device).t().contiguous().unbind(0)
        block_table = upload([*table, [num_blocks] * width], device)
        blocks, offsets = block_table[slots, positions // block_size], positions % block_size
        kv_slots = blocks * block_size + offsets
        runs = RowRuns(len(lengths), max(lengths), upload(firsts, device), 0, 0)
        scored = [
            first + at
            for first, length, start in zip(firsts, lengths, starts, strict=False)
            for at in range(start - 1, length - 1)
        ]
        token_ids = upload([*chain(*sequences)], device)
        predicting = upload(scored, device)
        return cls(
            lengths=lengths,
            token_ids=token_ids,
            rows=AttentionRows(positions, slots, kv_slots, block_table, runs),
            places=(blocks, offsets),
            scored=predicting,
            chosen=token_ids[predicting + 1],
            num_scored=tuple(n - start for n, start in zip(lengths, starts, strict=True)),
            num_blocks=num_blocks,
            block_size=block_size,
        )

    def cache(self, caches: Sequence[LayerCache]) -> ModelCache:
        """Memory for a pass; layers of one form share it, as each ends before the next.

        A layer that reads another's KV reads that of the last such layer before it.
        """
        distinct = tuple(dict.fromkeys(caches))
        memory = ModelCache.allocate(
            distinct,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=len(self.lengths),
            num_drafts=0,
            device=self.token_ids.device,
        )
        shared = dict(zip(distinct, memory.layers, strict=True))
        return replace(memory, layers=tuple(self._recorded(shared[form]) for form in caches))

    def _recorded(self, memory: object) -> RecordedKV | RecordedMemory | None:
        match memory:
            case LayerKV(keys, values):
                return RecordedKV(keys, values, lengths=self.lengths, places=self.places)
            case LayerMemory(states, history, pending_mixed, pending_gates):
                return RecordedMemory(states, history, pending_mixed, pending_gates, self.lengths)
        # Latent attention has no gradients.
        assert memory is None
        return None


def checked_sequences(
    sequences: Iterable[Iterable[int]],
    starts: Iterable[int] | None,
    *,
    longest: int,
    vocab_size: int,
) -> tuple[list[list[int]], list[int]]:
    """Sequences and starts as lists, of which every one can be scored.

    Args:
        sequences: token ids.
        starts: by sequence, index of the first scored token; None: 1.
        longest: the most tokens of a sequence.
        vocab_size: token ids are below it.

    Raises:
        RequestError: names the sequence.
    """
    try:
        lists = [[*map(index, ids)] for ids in sequences]
        firsts = [1] * len(lists) if starts is None else [*map(index, starts)]
    except TypeError as error:
        raise RequestError(
            f"sequences or starts are no integers ({error})",
            "give a list of token ids for each sequence, and one start",
        ) from error
    if not lists or len(firsts) != len(lists):
        raise RequestError(
            f"{counted(len(firsts), 'start')} for {counted(len(lists), 'sequence')}",
            "give at least one sequence, and one start for each",
        )
    for place, (ids, start) in enumerate(zip(lists, firsts, strict=True)):
        if not 1 <= start < len(ids) <= longest:
            raise RequestError(
                f"sequence {place} has {len(ids)} tokens, to be scored from {start} on",
                f"give at most {longest} tokens (max_model_len), at least one of them scored, and "
                "none of them the first",
            )
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise RequestError(
                f"sequence {place} has a token outside the vocabulary 0..{vocab_size - 1}",
                "give token ids of this model",
            )
    return lists, firsts

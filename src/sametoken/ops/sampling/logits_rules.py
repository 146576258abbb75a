"""Logits rules by slot, and the packed integers in which the host passes edits to kernels.

A packed row holds, in order: the header, ids of banned tokens, ids of stop tokens, ids of biased
tokens, their biases (bits of fp32), the bitmask of allowed ids (bit ``id % 64`` of word
``id // 64``; ids beyond the last word are not allowed), the offset of each bad word in the row, its
number of tokens, and the bad words' tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.errors import InvariantError


class CommittedTokens(Protocol):
    """Committed tokens by slot, as ``state.sequences.Sequences`` holds them."""

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def prompt_len(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """Masks, biases and penalties by slot; S slots, few of which have any.

    Attributes:
        edits: on the host, by slot with masks or biases: its packed row on the device.
        edit_addresses: [S] int64, address of that row; 0 for none.
        counters: on the host, by slot with penalties: its own index below S.
        counter_of: [S] int64, the same; -1 for none.
        repetition, frequency, presence: [S] fp32; 1, 0 and 0 have no effect.
    """

    edits: dict[int, Tensor]
    edit_addresses: Tensor
    counters: dict[int, int]
    counter_of: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


WORD_BITS = 64


class Header(NamedTuple):
    """The first integers of a packed row.

    Attributes:
        min_tokens: output tokens before which stop tokens are masked.
        lowest, lowest_early: the lowest id that is allowed and not banned; ``lowest_early`` is
            no masked stop token either.
        num_banned, num_stops, num_biases, num_mask_words, num_bad_words: lengths of the lists.
        longest: tokens of the longest bad word; 0 without any.
    """

    min_tokens: int
    lowest: int
    lowest_early: int
    num_banned: int
    num_stops: int
    num_biases: int
    num_mask_words: int
    num_bad_words: int
    longest: int


HEADER_SIZE = len(Header._fields)


@dataclass(frozen=True, slots=True)
class Edits:
    """Masks and biases of a request; only bad words depend on earlier tokens.

    Attributes:
        allowed_ids: the only ids that may be sampled; None for all.
        banned_ids: ids that may not be sampled.
        stop_ids: ids masked before ``min_tokens`` output tokens; none if that is 0.
        min_tokens: see ``stop_ids``.
        bad_words: sequences of two or more tokens that the output may not complete.
        biases: by id, added to the logits.
    """

    allowed_ids: frozenset[int] | None
    banned_ids: frozenset[int]
    stop_ids: frozenset[int]
    min_tokens: int
    bad_words: tuple[tuple[int, ...], ...]
    biases: dict[int, float]

    def pack(self) -> list[int]:
        """The packed row.

        Raises:
            InvariantError: the masks forbid every token. ``sampling.admission`` refuses these
                requests.
        """
        words = self.bad_words
        mask = _mask_words(self.allowed_ids or ())
        header = Header(
            min_tokens=self.min_tokens,
            lowest=self._lowest(self.banned_ids),
            lowest_early=self._lowest(self.banned_ids | self.stop_ids),
            num_banned=len(self.banned_ids),
            num_stops=len(self.stop_ids),
            num_biases=len(self.biases),
            num_mask_words=len(mask),
            num_bad_words=len(words),
            longest=max(map(len, words), default=0),
        )
        biases = torch.tensor(list(self.biases.values()), dtype=torch.float32)
        row = [*header, *sorted(self.banned_ids), *sorted(self.stop_ids)]
        row += [*self.biases, *biases.view(torch.int32).tolist(), *mask]
        lengths = [len(word) for word in words]
        first = len(row) + 2 * len(words)
        row += [*accumulate(lengths[:-1], initial=first)][: len(words)]
        row += [*lengths, *(token for word in words for token in word)]
        return row

    def _lowest(self, masked: frozenset[int]) -> int:
        candidates = count() if self.allowed_ids is None else sorted(self.allowed_ids)
        for token_id in candidates:
            if token_id not in masked:
                return token_id
        raise InvariantError("a request was admitted whose masks forbid every token")


def _mask_words(allowed_ids: Iterable[int]) -> list[int]:
    """Bitmask of the allowed ids in signed 64-bit words; empty without ids."""
    size = -(-(max(allowed_ids, default=-1) + 1) // WORD_BITS)
    bits = torch.zeros(size * WORD_BITS, dtype=torch.int64)
    bits[torch.tensor(list(allowed_ids), dtype=torch.int64)] = 1
    # Bits are distinct, so their sum has no carry; the highest bit makes a word negative.
    return (bits.view(-1, WORD_BITS) << torch.arange(WORD_BITS)).sum(dim=1).tolist()


@dataclass(frozen=True, slots=True)
class Parts:
    """An unpacked row; all tensors except ``biases`` are views of it.

    Attributes:
        header: its first integers.
        banned_ids, stop_ids, bias_ids: int64.
        biases: [len(bias_ids)] fp32.
        mask_words: int64; empty if every id is allowed.
        bad_words: see ``Edits``.
    """

    header: Header
    banned_ids: Tensor
    stop_ids: Tensor
    bias_ids: Tensor
    biases: Tensor
    mask_words: Tensor
    bad_words: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, row: Tensor) -> Parts:
        """Unpack what ``Edits.pack`` made; copies the header and the bad words to the host."""
        header = Header(*row[:HEADER_SIZE].tolist())
        sizes = [HEADER_SIZE, header.num_banned, header.num_stops, header.num_biases]
        sizes += [header.num_biases, header.num_mask_words, header.num_bad_words]
        sizes += [header.num_bad_words]
        *parts, tokens = row.split([*sizes, row.shape[0] - sum(sizes)])
        _, banned, stops, bias_ids, bias_bits, mask, _, lengths = parts
        ends = [*accumulate(lengths.tolist(), initial=0)]
        flat = tokens.tolist()
        return cls(
            header=header,
            banned_ids=banned,
            stop_ids=stops,
            bias_ids=bias_ids,
            biases=bias_bits.to(torch.int32).view(torch.float32),
            mask_words=mask,
            bad_words=tuple(tuple(flat[first:end]) for first, end in pairwise(ends)),
        )

    @property
    def has_masks(self) -> bool:
        """Whether tokens may be forbidden."""
        header = self.header
        counts = (header.num_banned, header.num_stops, header.num_mask_words, header.num_bad_words)
        return sum(counts) > 0

    def allowed_ids(self, vocab_size: int) -> Tensor:
        """[A] int64 below V, ascending, for a row with mask words."""
        # By bytes (little-endian words): an eighth of the memory.
        shifts = torch.arange(8, dtype=torch.uint8, device=self.mask_words.device)
        octets = self.mask_words.view(torch.uint8)
        bits = ((octets[:, None] >> shifts) & 1).flatten()
        return bits[:vocab_size].nonzero().squeeze(1)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Top-k, top-p and min-p by slot (docs/lossless.md).

    Attributes:
        temperature: [S] fp32; 0 for greedy slots, whose logits are not truncated.
        top_k: [S] int64, 0 keeps all.
        top_p, min_p: [S] fp64; 1 and 0 keep all.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

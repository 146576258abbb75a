"""N-gram prompt lookup in plain PyTorch; also the CPU path.

Matches are chosen as in vLLM (``vllm/v1/spec_decode/ngram_proposer.py``): the longest suffix of at
most ``max_length`` tokens that occurred before, at its earliest occurrence, which leaves the most
tokens to copy.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lookup(
    token_ids: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    *,
    min_length: int,
    max_length: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Up to k tokens that followed the earliest occurrence of the longest repeated suffix.

    The occurrence ends before the sequence does, but may overlap the suffix itself.

    Args:
        token_ids: [S, max_len] int64; values at ``num_tokens`` and above are not used.
        slots: [B] int64, the slot of each row.
        num_tokens: [B] int64; 0 for padding, which has no match.
        min_length: shortest suffix to match, in tokens.
        max_length: longest suffix to match, in tokens.
        k: most tokens to copy; all are below ``num_tokens``.

    Returns:
        ids [B, k] int64, of which the first ``count`` [B] int64 are valid; all are tokens of the
        row's sequence. A row without a match has count 0.
    """
    tokens = within_longest(token_ids, num_tokens).index_select(0, slots)
    width = tokens.shape[1]
    last = (num_tokens - 1).clamp(min=0)

    # An occurrence is identified by the index of its last token, which is before the suffix's.
    ends = torch.arange(width, device=tokens.device)
    final_token = tokens.gather(1, last[:, None])
    row, end = ((tokens == final_token) & (ends < last[:, None])).nonzero(as_tuple=True)
    length = _match_length(tokens, row, end, last, max_length)

    # Longest first, then earliest, as one number to maximise per row.
    rank = torch.where(length >= min_length, length * width + (width - 1 - end), -1)
    best = torch.full_like(num_tokens, -1).scatter_reduce(0, row, rank, "amax")
    found = best >= 0
    first = torch.where(found, width - best % width, num_tokens)

    count = torch.where(found, (num_tokens - first).clamp(max=k), 0)
    offsets = torch.arange(k, device=tokens.device)
    sources = torch.minimum(first[:, None] + offsets, last[:, None])
    return tokens.gather(1, sources), count


def _match_length(
    tokens: Tensor, row: Tensor, end: Tensor, last: Tensor, max_length: int
) -> Tensor:
    """[M] int64: number of equal tokens up to ``end`` and up to ``last``, at most max_length."""
    length = torch.ones_like(end)
    matches = torch.ones_like(end, dtype=torch.bool)
    for back in range(1, max_length):
        matches &= end >= back
        here = (end - back).clamp(min=0)
        there = (last[row] - back).clamp(min=0)
        matches &= tokens[row, here] == tokens[row, there]
        length += matches
    return length


def within_longest(token_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """The columns that hold tokens of any row."""
    longest = int(num_tokens.max()) if num_tokens.numel() else 0
    return token_ids[:, : max(longest, 1)]

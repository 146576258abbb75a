"""Suffix search in plain PyTorch; also the CPU path.

Based on suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): drafts follow the longest earlier
match of the sequence's end, in its own text or in those of earlier requests; their number grows
with the length of the match, as long as its continuations agree. Texts are scanned, not kept in
suffix trees, so there is no index to update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.lookup.ngram import within_longest

#: The best of GROUP neighbouring places may vote, and at most MAX_VOTERS of these do.
GROUP = 16
MAX_VOTERS = 32
# Places of earlier texts that are compared at once, over all rows; bounds the memory of a search
# (tests/unit/ops/lookup/test_suffix.py).
_PLACES = 2**18
# Tokens of a match that are compared at once: most matches end within them.
_NEAR = 4


@dataclass(frozen=True, slots=True)
class Earlier:
    """Texts of earlier requests. R texts.

    Attributes:
        texts: [R, W] int64 token ids; values at ``lengths`` and above are not used.
        lengths: [R] int64, number of tokens of each.
    """

    texts: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on drafts, as tables that kernels look up.

    Attributes:
        num_drafts: [depth + 1] int64, the most drafts by match length.
        agreeing: [MAX_VOTERS + 1] int64, by number of voters, how many of them must agree on a
            draft and all drafts before it.
        k: the most drafts.
    """

    num_drafts: Tensor
    agreeing: Tensor
    k: int

    @classmethod
    def of(
        cls, k: int, *, depth: int, min_match: int, factor: float, min_prob: float,
        device: torch.device,
    ) -> Limits:  # fmt: skip
        """Tables on ``device``.

        Args:
            k: the most drafts.
            depth: longest match, in tokens.
            min_match: shortest match that gives drafts.
            factor: the most drafts per matched token.
            min_prob: share of the voters that must agree, 0..1; at least one voter.
            device: of the search.
        """
        lengths = range(depth + 1)
        num_drafts = [min(k, int(factor * n)) if n >= min_match else 0 for n in lengths]
        agreeing = [max(1, math.ceil(min_prob * n)) for n in range(MAX_VOTERS + 1)]
        return cls(
            torch.tensor(num_drafts, dtype=torch.int64, device=device),
            torch.tensor(agreeing, dtype=torch.int64, device=device),
            k,
        )

    @property
    def depth(self) -> int:
        """Longest match, in tokens."""
        return self.num_drafts.shape[0] - 1


_NO_TOKEN = torch.iinfo(torch.int64).min


def search(
    token_ids: Tensor, slots: Tensor, num_tokens: Tensor, *, earlier: Earlier, limits: Limits
) -> tuple[Tensor, Tensor]:
    """Drafts that the continuations of the longest match agree on.

    A place is a token equal to the sequence's last one, with a token after it; its match is the
    number of tokens up to it that equal those up to the sequence's end. In every ``GROUP``
    neighbouring places, the one with the longest match (the earliest of several) may vote; those
    with the longest match of all do vote, ``MAX_VOTERS`` at most, the row's own text first. Draft
    by draft, the next token of most voters is taken (of the first voter in a tie), and voters with
    another token drop out.

    Args:
        token_ids: [S, max_len] int64; values at ``num_tokens`` and above are not used.
        slots: [B] int64, the slot of each row.
        num_tokens: [B] int64; 0 for padding, which has no match.
        earlier: texts of other requests.
        limits: limits on drafts.

    Returns:
        ids [B, k] int64, of which the first ``count`` [B] int64 are valid; the others are 0.
    """
    best = _best_ranks(token_ids, slots, num_tokens, earlier, limits.depth)
    span = _span(token_ids, earlier)
    length = best // span
    voting = (best >= 0) & (length == length[:, :1])
    num_voters = voting.sum(dim=1)
    if best.numel():
        # Voters are sorted first.
        best, voting = (one[:, : max(int(num_voters.max()), 1)] for one in (best, voting))
    most = torch.where(num_voters > 0, limits.num_drafts[length[:, 0].clamp(min=0)], 0)
    needed = limits.agreeing[num_voters]
    tokens, going = _following(
        span - 1 - best % span, limits.k, token_ids, slots, num_tokens, earlier
    )

    drafts = torch.zeros((slots.shape[0], limits.k), dtype=torch.int64, device=slots.device)
    count = torch.zeros_like(num_tokens)
    agree = voting
    for i in range(limits.k):
        token, there = tokens[:, :, i], going[:, :, i] & agree
        same = (token[:, :, None] == token[:, None, :]) & there[:, :, None] & there[:, None, :]
        votes, winner = same.sum(dim=2).max(dim=1)
        chosen = token.gather(1, winner[:, None])
        goes_on = (count == i) & (i < most) & (votes >= needed)
        if not goes_on.any():
            break
        drafts[:, i] = torch.where(goes_on, chosen.squeeze(1), 0)
        count += goes_on
        agree = there & (token == chosen)
    return drafts, count


def _following(
    place: Tensor,
    k: int,
    token_ids: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    earlier: Earlier,
) -> tuple[Tensor, Tensor]:
    """The k tokens after places, [B, V, k], and whether they are within their texts, bool."""
    max_len, width = token_ids.shape[1], earlier.texts.shape[1]
    is_own = place < max_len
    offset = torch.arange(1, k + 1, device=place.device)
    position = torch.where(is_own, place, (place - max_len) % width)[:, :, None] + offset
    going = position < num_tokens[:, None, None]
    own = is_own[:, :, None]
    tokens = token_ids[slots[:, None, None], torch.where(going & own, position, 0)]
    if not earlier.lengths.numel():
        return tokens, going
    text = torch.where(is_own, 0, (place - max_len) // width)
    going = torch.where(own, going, position < earlier.lengths[text][:, :, None])
    others = earlier.texts[text[:, :, None], torch.where(going & ~own, position, 0)]
    return torch.where(own, tokens, others), going


def _span(token_ids: Tensor, earlier: Earlier) -> int:
    """Total number of places: a row's own text, then every earlier text."""
    return token_ids.shape[1] + earlier.texts.numel()


def _best_ranks(
    token_ids: Tensor, slots: Tensor, num_tokens: Tensor, earlier: Earlier, depth: int
) -> Tensor:
    """[B, MAX_VOTERS] int64: ranks of the places that may vote, the best first; -1: none.

    The rank of a place puts the longest match first, then the earliest.
    """
    max_len, width = token_ids.shape[1], earlier.texts.shape[1]
    span = _span(token_ids, earlier)
    own = within_longest(token_ids, num_tokens).index_select(0, slots)
    last = (num_tokens - 1).clamp(min=0)
    final = own.gather(1, last[:, None])
    # The row's tokens from its end backwards; positions before its first match nothing.
    backwards = last[:, None] - torch.arange(depth, device=own.device)
    ending = own.gather(1, backwards.clamp(min=0)).masked_fill(backwards < 0, _NO_TOKEN)
    best = torch.full((slots.shape[0], MAX_VOTERS), -1, dtype=torch.int64, device=slots.device)

    def merged(row: Tensor, length: Tensor, place: Tensor, group: Tensor, groups: int) -> Tensor:
        """``best`` with the best place of every group, [M] each."""
        ranks = best.new_full((best.shape[0], groups), -1)
        rank = length * span + (span - 1 - place)
        ranks.view(-1).scatter_reduce_(0, row * groups + group, rank, "amax")
        return torch.cat((best, ranks), dim=1).topk(MAX_VOTERS, dim=1).values

    ends = torch.arange(own.shape[1], device=own.device)
    row, end = ((own == final) & (ends < last[:, None])).nonzero(as_tuple=True)
    length = _match_length(own, row, end, ending, row)
    best = merged(row, length, end, end // GROUP, _groups(own))

    texts = within_longest(earlier.texts, earlier.lengths)
    ends = torch.arange(texts.shape[1], device=own.device)
    count = max(1, _PLACES // max(1, texts.shape[1] * slots.shape[0]))
    for first in range(0, texts.shape[0], count):
        some, lengths = texts[first : first + count], earlier.lengths[first : first + count]
        found = (some == final[:, :, None]) & (ends < lengths[:, None] - 1)
        found &= (num_tokens > 0)[:, None, None]
        row, text, end = found.nonzero(as_tuple=True)
        length = _match_length(some, text, end, ending, row)
        place = max_len + (first + text) * width + end
        group = text * _groups(texts) + end // GROUP
        best = merged(row, length, place, group, some.shape[0] * _groups(texts))
    return best


def _groups(texts: Tensor) -> int:
    """Groups of neighbouring places in each text."""
    return -(-texts.shape[1] // GROUP)


def _match_length(texts: Tensor, text: Tensor, end: Tensor, ending: Tensor, row: Tensor) -> Tensor:
    """[M] int64: how many tokens of texts are equal to the ends of rows, both read backwards.

    Args:
        texts: [R, W] int64.
        text, end: [M] int64, a text and the place in it to begin at.
        ending: [B, depth] int64, tokens of rows from their end backwards.
        row: [M] int64.
    """
    length, going = torch.zeros_like(end), torch.arange(end.shape[0], device=end.device)
    for first in range(0, ending.shape[1], _NEAR):
        wanted = ending[:, first : first + _NEAR][row[going]]
        back = torch.arange(first, first + wanted.shape[1], device=end.device)
        backwards = end[going, None] - back
        tokens = texts[text[going, None], backwards.clamp(min=0)]
        equal = (tokens == wanted) & (backwards >= 0)
        run = equal.cumprod(dim=1).sum(dim=1)
        length[going] += run
        going = going[run == wanted.shape[1]]
    return length

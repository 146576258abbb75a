"""Keyed sampling (Gumbel-max trick) in plain PyTorch; also the CPU path.

Noise comes from Philox4x32-10 (Salmon et al., SC 2011), a counter-based generator: word
``token_id % 4`` of the block with counter (token_id // 4, position low, position high, 0)
and key (seed low, seed high). It has no state, so speculation cannot advance it.

A key packs a candidate token into one int64: an order-preserving image of its fp32 value in the
upper half, the complement of its id in the lower one. The largest key is the best value with the
lowest id. NaN ranks above all values and so marks its row.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Rows are independent: batches of bounded size save memory and change no bits.
_ROWS_AT_A_TIME = 16

_Words = tuple[Tensor, ...]


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """``argmax(logits / T + gumbel)`` per row; plain argmax where T is 0.

    Args:
        logits: [L, V'] fp32, not written; rows that are all -inf or hold NaN give a valid id.
        temperature: [L] fp32, 0 for greedy rows.
        seeds: [L] int64, 0..2^63-1.
        positions: [L] int64, absolute position of the sampled token.
        token_ids: [V'] int64, ascending: the token of each column; None: column i is token i.
        slots: [L] int64: ``temperature`` and ``seeds`` are [S], and row l takes ``slots[l]``'s.

    Returns:
        [L] int64; the lowest id among equal values.
    """
    if slots is not None:
        temperature, seeds = temperature[slots], seeds[slots]
    columns = logits.argmax(dim=-1)
    vocab_size = logits.shape[1] if token_ids is None else int(token_ids[-1]) + 1
    noisy = (temperature > 0).nonzero().squeeze(1)
    for first in range(0, noisy.shape[0], _ROWS_AT_A_TIME):
        rows = noisy[first : first + _ROWS_AT_A_TIME]
        noise = gumbel_noise(seeds[rows], positions[rows], vocab_size)
        if token_ids is not None:
            noise = noise[:, token_ids]
        values = logits[rows].div_(temperature[rows, None]).add_(noise)
        columns[rows] = values.argmax(dim=-1)
    return columns if token_ids is None else token_ids[columns]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, a function of (seed, position, token id) only.

    Args:
        seeds: [L] int64, 0..2^63-1.
        positions: [L] int64.
        vocab_size: V.

    Returns:
        [L, V] fp32, finite.
    """
    blocks = torch.arange(-(-vocab_size // 4), device=seeds.device)[None, :]
    low, high = positions[:, None] & _MASK, (positions[:, None] >> 32) & _MASK
    key = (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK)
    words = philox((blocks, low, high, torch.zeros_like(low)), key)
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # The offset keeps 0 out, the cap keeps 1 out: both logarithms below are finite.
    uniform = (bits.float() * 2**-32 + 2**-33).clamp_(max=1 - 2**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def philox(counter: _Words, key: tuple[Tensor, Tensor]) -> _Words:
    """Philox4x32 with 10 rounds on int64 tensors that hold 32-bit words and broadcast."""
    # numpy takes half the time of torch on few words.
    c0, c1, c2, c3, k0, k1 = (word.cpu().numpy() for word in (*counter, *key))
    for _ in range(_ROUNDS):
        # int64 products wrap, which leaves all 64 bits of the unsigned product in place.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return tuple(torch.from_numpy(word).to(counter[0].device) for word in (c0, c1, c2, c3))


NAN_RANK = 0x7FFFFFFF
#: The image of -inf: the best of a row without a valid token.
NO_TOKEN_RANK = -0x7F800001
ID_MASK = 0xFFFFFFFF


def make_keys(values: Tensor, token_ids: Tensor) -> Tensor:
    """Keys of candidates.

    Args:
        values: fp32; NaN for a row that holds one.
        token_ids: int64, of the same shape.
    """
    bits = (values + 0.0).view(torch.int32)
    ranks = (bits ^ ((bits >> 31) & NAN_RANK)).long().masked_fill(values.isnan(), NAN_RANK)
    return (ranks << 32) | (ID_MASK - token_ids)


def token_of(keys: Tensor) -> Tensor:
    """The token ids in keys."""
    return ID_MASK - (keys & ID_MASK)


def has_nan(keys: Tensor) -> Tensor:
    """Whether a row's best value is NaN."""
    return (keys >> 32) == NAN_RANK


def has_no_valid_token(keys: Tensor) -> Tensor:
    """Whether a row's best value is -inf: the row has no valid token."""
    return (keys >> 32) == NO_TOKEN_RANK

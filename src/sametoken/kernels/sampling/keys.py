"""Keys: a candidate token as one int64, comparable in any order.

An order-preserving image of its fp32 value stands above the complement of its id, so the largest
key is the best value with the lowest id. NaN ranks above all and marks its row.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAN_RANK = 0x7FFFFFFF
#: The image of -inf: the best of a row that has nothing else.
NOTHING_RANK = -0x7F800001
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


def is_nan(keys: Tensor) -> Tensor:
    """Whether a row's best value is NaN."""
    return (keys >> 32) == NAN_RANK


def is_nothing(keys: Tensor) -> Tensor:
    """Whether a row's best value is -inf: the row has no token left."""
    return (keys >> 32) == NOTHING_RANK

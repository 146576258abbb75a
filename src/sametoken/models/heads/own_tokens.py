"""Token maps in the files of heads: the only tokens that a head proposes."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.models.load.sources import TensorSource, dtype_name

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_REMEDY = "check that config and weights belong together"


def read_own_tokens(
    source: TensorSource, name: str, count: int, vocab_size: int, *, as_offsets: bool = False
) -> Tensor:
    """[count] int64 ids of the target, on the host, in the file's order.

    Args:
        source: the head's tensors.
        name: of the map.
        count: ids in it.
        vocab_size: of the target; ids are below it.
        as_offsets: whether it holds each id's distance from its place.

    Raises:
        CheckpointError: it is missing, of another shape, or leads to no ids, or to one twice.
    """
    location = source.location
    shape = source.shape(name) if name in source.names() else None
    if shape != (count,):
        found = "none" if shape is None else f"shape {list(shape)}"
        raise CheckpointError(f"{location} needs {name} of shape [{count}], found {found}", _REMEDY)
    dtype = source.stored_dtype(name)
    if dtype not in _INTEGERS:
        raise CheckpointError(
            f"{location}: {name} has dtype {dtype_name(dtype)}, no integers", _REMEDY
        )
    token_ids = torch.cat(list(source.stored_chunks(name))).long()
    if as_offsets:
        token_ids += torch.arange(count)
    low, high = torch.aminmax(token_ids)
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"{location}: {name} leads to token ids {int(low)}..{int(high)}, "
            f"outside a vocabulary of {vocab_size}",
            _REMEDY,
        )
    if token_ids.unique().numel() < count:
        raise CheckpointError(f"{location}: {name} names a token twice", _REMEDY)
    return token_ids


def ascending(token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids in order, and where each one's row stands among them, as ``Part.permutation``."""
    return token_ids.sort().values, token_ids.argsort(stable=True).argsort()

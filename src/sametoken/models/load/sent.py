"""Tensors that a trainer sends, as the tensors of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError, WeightUpdateError, shown
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.weights import TensorSource, rows_per_chunk

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class SentTensors:
    """A ``TensorSource`` over tensors in memory, which must not change while it is read.

    Args:
        tensors: names and tensors; all of them are taken, and none is copied.

    Raises:
        WeightUpdateError: an item is no name with a tensor, or a name comes twice.
    """

    location = "the update"

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for item in tensors:
            name, tensor = _pair_of(item)
            if name in self._tensors:
                raise WeightUpdateError(
                    f"the tensor {shown(name)} is sent twice", "send each tensor once"
                )
            self._tensors[name] = tensor.detach()

    def names(self) -> Collection[str]:
        """The names that were sent."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that was sent."""
        return tuple(self._tensors[name].shape)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Views of the tensor's rows; see ``TensorSource.chunks``."""
        tensor = self._tensors[name]
        if tensor.dtype not in _FLOATING or tensor.layout != torch.strided:
            raise UnsupportedError(
                f"tensor {name} of {self.location} is {tensor.layout} of {tensor.dtype}",
                f"send dense tensors of {', '.join(map(str, _FLOATING))}",
            )
        yield from self.stored_chunks(name)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor that was sent."""
        return self._tensors[name].dtype

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """As ``chunks``, of any dtype; a scalar is one row."""
        tensor = self._tensors[name]
        rows = tensor if tensor.dim() else tensor[None]
        yield from rows.split(rows_per_chunk(math.prod(rows.shape[1:])))


def source_of(weights: Iterable[tuple[str, Tensor]] | str | Path) -> TensorSource:
    """The tensors that were sent, or those of a directory; errors as in both.

    Raises:
        CheckpointError: there is no such directory.
    """
    if not isinstance(weights, str | Path):
        return SentTensors(weights)
    if not Path(weights).is_dir():
        raise CheckpointError(f"{weights} is no directory", "give one with the new weights")
    return open_weights(Path(weights))


def _pair_of(item: object) -> tuple[str, Tensor]:
    match item:
        case (str() as name, Tensor() as tensor):
            return name, tensor
    raise WeightUpdateError(
        f"{shown(item)} is no name with a tensor", "send pairs, as model.state_dict().items()"
    )

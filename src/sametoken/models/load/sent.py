"""Tensors that a trainer sends, as the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError, WeightUpdateError, shown
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.sources import FLOATING, TensorsByName, TensorSource


class SentTensors(TensorsByName):
    """A ``TensorSource`` over tensors in memory, which must not change while it is read.

    Args:
        tensors: names and tensors; all of them are taken, and none is copied.
        location: where they are, for messages.

    Raises:
        WeightUpdateError: there are no items, one is no name with a tensor, or a name comes
            twice.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], location: str = "the update") -> None:
        found: dict[str, Tensor] = {}
        if not isinstance(tensors, Iterable):
            raise WeightUpdateError(
                f"weights of type {type(tensors).__name__} are not possible",
                "send pairs, as model.state_dict().items(), or give a directory",
            )
        for item in tensors:
            name, tensor = named_tensor(item)
            if name in found:
                raise WeightUpdateError(
                    f"the tensor {shown(name)} is sent twice", "send each tensor once"
                )
            found[name] = tensor.detach()
        super().__init__(location, found)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Views of the tensor's rows; see ``TensorSource.chunks``."""
        dtype = self._tensors[name].dtype
        if dtype not in FLOATING:
            raise UnsupportedError(
                f"tensor {name} of {self.location} is of {dtype}",
                f"send tensors of {', '.join(map(str, FLOATING))}",
            )
        yield from self.stored_chunks(name)


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


def named_tensor(item: object) -> tuple[str, Tensor]:
    """A name with a dense tensor that has all of its values here.

    Raises:
        WeightUpdateError: it is something else.
    """
    match item:
        case (str() as name, Tensor() as tensor):
            _require_dense(name, tensor)
            return name, tensor
    raise WeightUpdateError(
        f"{shown(item)} is no name with a tensor", "send pairs, as model.state_dict().items()"
    )


def _require_dense(name: str, tensor: Tensor) -> None:
    # Of torch's own kinds only DTensor has this method.
    if hasattr(tensor, "full_tensor"):
        raise WeightUpdateError(
            f"the tensor {shown(name)} is a DTensor, of which a rank has a part",
            "send what its full_tensor() returns, which all ranks of the trainer call",
        )
    if tensor.layout != torch.strided:
        raise WeightUpdateError(
            f"the tensor {shown(name)} is {tensor.layout}", "send what its to_dense() returns"
        )
    if tensor.is_meta:
        raise WeightUpdateError(
            f"the tensor {shown(name)} is on the meta device, without values", "load it first"
        )

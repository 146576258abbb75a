"""Weights that change in place: new tensors in the memory of old ones.

Captured graphs and cached addresses keep pointing at a model's memory. So new weights are loaded
as a second model of the same class, by the code that loaded the first, and every tensor of it is
then copied over its counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from sametoken.errors import InvariantError, WeightUpdateError
from sametoken.layers.share import Part
from sametoken.models.base import StandIn
from sametoken.models.decoder import Decoder
from sametoken.models.load.weights import WeightReader
from sametoken.ops.native.library import NativeLibrary


@dataclass(frozen=True, slots=True)
class Replacement:
    """Tensors in use, each with the one whose values it is to have; nothing is written yet."""

    pairs: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, live: object, loaded: object) -> Replacement:
        """Match the tensors of two models of one form by their place.

        Args:
            live: models and heads that run, nested in any way.
            loaded: the same with new weights; may share tensors with ``live``.

        Raises:
            WeightUpdateError: weights that are shared in one of them are not in the other.
            InvariantError: the two differ in form.
        """
        old, new = dict(_tensors(live, "")), dict(_tensors(loaded, ""))
        if old.keys() != new.keys():
            raise InvariantError(f"new weights lack or add {min(old.keys() ^ new.keys())}")
        ahead: dict[tuple[int, int], tuple[int, int]] = {}
        back: dict[tuple[int, int], tuple[int, int]] = {}
        for place, tensor in old.items():
            _require_same_form(place, tensor, new[place])
            mine, theirs = _memory_of(tensor), _memory_of(new[place])
            if ahead.setdefault(mine, theirs) != theirs or back.setdefault(theirs, mine) != mine:
                raise WeightUpdateError(
                    f"the weight at {place} is shared in the running model and not in the new one, "
                    "or the other way round",
                    "send equal copies of shared tensors, or leave the copies out",
                )
        distinct = {_memory_of(tensor): (tensor, new[place]) for place, tensor in old.items()}
        return cls(tuple(pair for at, pair in distinct.items() if ahead[at] != at))

    def without(self, left_out: Sequence[Tensor]) -> Replacement:
        """The same, but tensors in use stay whose new ones would be these.

        Raises:
            InvariantError: one of them is no new tensor.
        """
        places = {_memory_of(tensor) for tensor in left_out}
        pairs = tuple(pair for pair in self.pairs if _memory_of(pair[1]) not in places)
        if len(pairs) + len(left_out) != len(self.pairs):
            raise InvariantError("a tensor that an update leaves out is not in the model")
        return Replacement(pairs)

    def write(self) -> None:
        """Copy all values, in stream order on a device; steps must not run meanwhile."""
        with torch.no_grad():
            for tensor, values in self.pairs:
                tensor.copy_(values)

    def drop(self) -> None:
        """Forget the new values; they will not be written."""


def tensors_of(node: object) -> tuple[Tensor, ...]:
    """The distinct tensors of a model or head."""
    return tuple({_memory_of(one): one for _, one in _tensors(node, "")}.values())


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Storage and offset in bytes, which name memory also while it is given back."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize


def _tensors(node: object, place: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors below a node by their place; kernels, whose tensors are none, are skipped."""
    if isinstance(node, Tensor):
        if node.numel():
            yield place, node
        return
    for name, child in children_of(node):
        yield from _tensors(child, f"{place}.{name}" if place else name)


def children_of(node: object) -> Iterator[tuple[str, object]]:
    """What a model, head, layer or weight is made of, by name.

    Not among it are where it was read from, and the C functions, which every weight refers to.
    """
    if isinstance(node, Part | WeightReader | NativeLibrary):
        return
    if isinstance(node, tuple | list):
        yield from ((str(index), child) for index, child in enumerate(node))
    elif isinstance(node, Decoder | StandIn):
        yield from vars(node).items()
    elif is_dataclass(node):
        yield from ((one.name, getattr(node, one.name)) for one in fields(node))


def _require_same_form(place: str, old: Tensor, new: Tensor) -> None:
    mine, theirs = ((one.shape, one.stride(), one.dtype, one.device) for one in (old, new))
    if mine != theirs:
        raise InvariantError(f"the weight at {place} is {mine}, the new one {theirs}")

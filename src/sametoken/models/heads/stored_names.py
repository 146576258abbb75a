"""A head's tensors and modules by the names that are read, and by those of its file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.models.load.linear_format import LinearFormat, Quantization
from sametoken.models.load.sources import TensorSource

LAYER = "layers.0"
#: Tensors of integers in the files of heads over fewer tokens.
_TOKEN_MAPS = ("d2t", "t2d")
_RENAMED = (
    ("model.", ""),
    ("midlayer.", f"{LAYER}."),
    ("transformer.", f"{LAYER}."),
    ("fusion_fc.", "fc."),
)


class NamedSource:
    """Some tensors of a source.

    Args:
        source: all tensors.
        names: the name in ``source`` of each tensor that is there.

    Attributes:
        stored: all tensors, under their own names.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self.location = source.location
        self.stored, self._names = source, names

    def stored_module(self, module: str) -> str:
        """The name in ``stored`` of a module, itself if it has no tensor."""
        for name, stored in self._names.items():
            if name.startswith(f"{module}."):
                return stored.removesuffix(name.removeprefix(module))
        return module

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that exists."""
        return self.stored.shape(self._names[name])

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The tensor in order, by rows."""
        return self.stored.chunks(self._names[name])

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor that exists."""
        return self.stored.stored_dtype(self._names[name])

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """As ``chunks``, of any dtype."""
        return self.stored.stored_chunks(self._names[name])


@dataclass(frozen=True, slots=True)
class NamedAsStored(Quantization):
    """``Quantization`` of a head, whose config names modules as its file does."""

    formats: Quantization

    def format_of(self, module: str, source: TensorSource) -> LinearFormat | None:
        """See ``Quantization``; None of a module that is the target's."""
        if not isinstance(source, NamedSource):
            return self.formats.format_of(module, source)
        stored = source.stored_module(module)
        if not any(name.startswith(f"{stored}.") for name in source.stored.names()):
            return None
        return self.formats.format_of(stored, source.stored)


def with_prefix(source: TensorSource, prefix: str) -> NamedSource:
    """The tensors with a prefix, under their own names."""
    return NamedSource(source, {name: name for name in source.names() if name.startswith(prefix)})


def head_source(source: TensorSource) -> NamedSource:
    """A head's floating-point tensors under the same names in either checkpoint layout."""
    names = {_renamed(name): name for name in source.names()}
    return NamedSource(source, {new: old for new, old in names.items() if new not in _TOKEN_MAPS})


def _renamed(name: str) -> str:
    for prefix, replacement in _RENAMED:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return name

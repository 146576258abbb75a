"""The most memory that tensors take at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        given = {storage._cdata for storage in _storages((*args, *kwargs.values()))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._note(storage)
        return result

    def _note(self, storage) -> None:
        name = storage._cdata
        if name not in self._live:
            self._live[name] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, name)

    def _forget(self, name: int) -> None:
        self._now -= self._live.pop(name)


def _storages(values) -> Iterator[torch.UntypedStorage]:
    """Of an operation's operands or results, which are nested in lists and tuples alone."""
    if isinstance(values, torch.Tensor):
        yield values.untyped_storage()
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _storages(value)

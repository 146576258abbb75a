"""The most memory that tensors take at once."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
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


def _storages(values):
    leaves = tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]

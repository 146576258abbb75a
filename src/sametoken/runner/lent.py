"""Tensors over memory that a CUDA graph's pool owns: good until another graph of it runs."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Lent = TypeVar("Lent")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Memory:
    """Device memory as CUDA's array interface (version 3) describes it."""

    def __init__(self, words: Tensor) -> None:
        size = words.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(words.shape),
            "typestr": f"<i{size}" if size > 1 else "|u1",
            "data": (words.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def lent(held: Lent) -> Lent:
    """A tensor, or a frozen dataclass with its tensors, that does not keep its memory.

    While a tensor lives, its graph's pool gives its memory to no other capture. Of one that is
    lent the pool disposes; what the graph leaves there is still read at the same address.
    """
    if isinstance(held, Tensor) and held.numel():
        assert held.is_contiguous()
        words = held.view(_WORDS[held.element_size()])
        return torch.as_tensor(_Memory(words), device=held.device).view(held.dtype)  # type: ignore[return-value]
    if is_dataclass(held) and not isinstance(held, type):
        parts: dict[str, Any] = {one.name: getattr(held, one.name) for one in fields(held)}
        return replace(held, **{name: lent(part) for name, part in parts.items()})
    return held

"""Blocks, numbers and pointers of kernels in Gluon that run in Python (``gluon_interpreter``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of the language, and what a pointer to it has as its own."""

    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch.itemsize

    @property
    def fp_mantissa_width(self) -> int:
        return -int(math.log2(torch.finfo(self.torch).eps))

    @property
    def exponent_bias(self) -> int:
        return 1 - int(math.log2(torch.finfo(self.torch).smallest_normal))

    @property
    def element_ty(self) -> Dtype:
        return self


def plain(value: Any) -> Any:
    """A block's tensor; anything else is itself."""
    return value.data if isinstance(value, Block) else value


def block(value: Any) -> Block:
    """What a function of the language takes, as a block of a tensor."""
    return Block(torch.as_tensor(plain(value)))


def number_or_block(data: torch.Tensor) -> Block:
    """A tensor as a block; a single integer is Python's."""
    return Block(data if data.dim() or data.is_floating_point() else data.item())


class Block:
    """A block of a kernel, a number, or an integer of Python's, which takes a tenth of the time."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return [] if isinstance(self.data, int) else list(self.data.shape)

    @property
    def dtype(self) -> Dtype:
        return Dtype(torch.as_tensor(self.data).dtype)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Dtype, bitcast: bool = False) -> Block:
        if isinstance(self.data, int) and not dtype.torch.is_floating_point:
            return self
        data = torch.as_tensor(self.data)
        return Block(data.view(dtype.torch) if bitcast else data.to(dtype.torch))

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Block:
        return Block(self.data.permute(order))

    def split(self) -> tuple[Block, Block]:
        low, high = self.data.unbind(-1)
        return Block(low), Block(high)

    def __getitem__(self, index: Any) -> Block:
        return Block(self.data[index])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Block:
        return Block(-self.data)


#: Torch has no arithmetic of words without a sign.
_WORDS = (torch.uint16, torch.uint32)


def _operation(name: str) -> Callable[[Block, Any], Any]:
    # Tensor.__floordiv__ is a function in Python, which takes as long again.
    method = torch.floor_divide if name == "__floordiv__" else getattr(torch.Tensor, name)

    def apply(self: Block, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        data, other = self.data, plain(other)
        if isinstance(data, int):
            if isinstance(other, int) and "truediv" not in name:
                # Of the number itself: two truths have a truth in common, no integer.
                return Block(getattr(data, name)(other))
            data = torch.as_tensor(data)
        if data.dtype in _WORDS:
            found = method(data.long(), other)
            return Block(found.to(data.dtype) if found.dtype == torch.int64 else found)
        found = method(data, other)
        if found is NotImplemented:
            found = method(data, torch.as_tensor(other))
        return Block(found)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):
    setattr(Block, f"__{_name}__", _operation(f"__{_name}__"))
    setattr(Block, f"__r{_name}__", _operation(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "lshift", "rshift"):
    setattr(Block, f"__{_name}__", _operation(f"__{_name}__"))


@dataclass(frozen=True, slots=True)
class Pointer:
    """Places in a tensor."""

    memory: torch.Tensor
    at: Any = 0

    @property
    def dtype(self) -> Dtype:
        return Dtype(self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Places, and which of them count, of one shape: None if all do. Those that count exist."""
        at, mask = torch.as_tensor(plain(self.at)), plain(mask)
        if mask is True:
            mask = None
        else:
            at, mask = torch.broadcast_tensors(at, torch.as_tensor(mask))
            at = torch.where(mask, at, 0)
        if at.numel():
            first, last = torch.aminmax(at)
            exist = first >= 0 and last < max(self.memory.numel(), 0 if mask is None else 1)
            assert exist, "an access outside of its tensor"
        return at, mask


def load(pointer: Pointer, mask: Any = True, other: Any = 0, **_: Any) -> Block:
    at, mask = pointer.places(mask)
    if mask is None:
        # One place would be a view, which sees what is stored later.
        return number_or_block(pointer.memory[at].clone())
    other = torch.as_tensor(plain(other), dtype=pointer.memory.dtype)
    if not pointer.memory.numel():
        assert not mask.any(), "an access outside of its tensor"
        return Block(other.broadcast_to(at.shape))
    return Block(torch.where(mask, pointer.memory[at], other))


def store(pointer: Pointer, value: Any, mask: Any = True, **_: Any) -> None:
    value = torch.as_tensor(plain(value)).to(pointer.memory.dtype)
    at, mask = pointer.places(mask)
    shape = torch.broadcast_shapes(at.shape, value.shape)
    at, value = at.broadcast_to(shape), value.broadcast_to(shape)
    if mask is not None:
        mask = mask.broadcast_to(shape)
        at, value = at[mask], value[mask]
    pointer.memory[at] = value


def atomic_add(pointer: Pointer, value: Any, **_: Any) -> Block:
    before = load(pointer)
    store(pointer, before + value)
    return before

"""Shared memory, barriers and products of kernels in Gluon that run in Python.

Swizzles mean nothing here: views with lines of one width agree on where elements lie.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from operator import add
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from helpers.gluon_blocks import Block, Dtype

#: Integers of as many bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Descriptor:
    """What TMA reads: boxes of a tensor, 0 outside of it."""

    def __init__(self, described: Any) -> None:
        self._base = described.base
        self.block_shape = described.block_shape

    @property
    def dtype(self) -> Dtype:
        return Dtype(self._base.dtype)

    def read(self, at: list[Any]) -> torch.Tensor:
        """The box that begins at these places."""
        begins = [int(begin) for begin in at]
        found = self._base[tuple(map(slice, begins, map(add, begins, self.block_shape)))]
        whole = torch.zeros(self.block_shape, dtype=_BITS[found.itemsize])
        whole[tuple(map(slice, found.shape))] = found.view(whole.dtype)
        return whole.view(found.dtype)


class Memory:
    """Bytes of shared memory, NaN at first.

    Attributes:
        unfenced: what a partition has stored and no fence has followed.
        copied: what copies cover, in the order in which they begin.
        loaded: what a partition has loaded since its threads met at a barrier.
        awaited: what copies of threads will cover.
    """

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.unfenced: dict[greenlet, list[range]] = {}
        self.copied: list[range] = []
        self.loaded: dict[greenlet, set[range]] = defaultdict(set)
        self.awaited: list[range] = []

    def fence(self) -> None:
        """What this partition has stored may be read by products."""
        self.unfenced.pop(getcurrent(), None)

    def require_free(self, wanted: range) -> None:
        """For a copy: no copy is on its way there, and no thread beside may still load from there.

        As to loads of other partitions see ``Loaded``.
        """
        loaded = self.loaded[getcurrent()]
        assert all(_apart(one, wanted) for one in self.awaited), "two copies to one place"
        assert all(_apart(one, wanted) for one in loaded), "a copy to what may still be read"


def _apart(a: range, b: range) -> bool:
    return a.stop <= b.start or b.stop <= a.start


class Loaded(Block):
    """A block from shared memory, in flight until its first use: no copy may cover it before.

    Barriers order the loads of threads and their stores, but not TMA's or another partition's.
    """

    __slots__ = ("_copied", "_data", "_extent", "_num_before")

    def __init__(self, memory: Memory, extent: range, data: torch.Tensor) -> None:
        self._copied, self._extent, self._data = memory.copied, extent, data
        self._num_before: int | None = len(memory.copied)

    @property
    def data(self) -> torch.Tensor:
        if self._num_before is not None:
            for copied in self._copied[self._num_before :]:
                assert _apart(self._extent, copied), "a copy covers what a load may still read"
            self._num_before = None
        return self._data

    @property
    def shape(self) -> list[int]:
        return list(self._data.shape)


@dataclass(frozen=True, slots=True)
class Shared:
    """A view of shared memory.

    Attributes:
        begin: its first byte.
        line: bytes of lines that stand under each other; 0: rows lie behind each other.
        reaches: beyond what it is a view of, over memory that others may write meanwhile.
    """

    memory: Memory
    begin: int
    dtype: Dtype
    shape: list[int]
    line: int
    transposed: bool = False
    reaches: bool = False

    def index(self, at: Any) -> Shared:
        assert 0 <= int(at) < self.shape[0]
        begin = self.begin + int(at) * (len(self.extent) // self.shape[0])
        return replace(self, begin=begin, shape=self.shape[1:])

    def permute(self, order: tuple[int, ...]) -> Shared:
        assert order == (1, 0)
        return replace(self, transposed=not self.transposed)

    def _reinterpret(self, dtype: Dtype, shape: list[int], layout: Any) -> Shared:
        found = Shared(self.memory, self.begin, dtype, [*map(int, shape)], line_bytes(layout))
        assert found.extent.stop <= len(self.memory.bytes)
        # Triton before 3.8 allows it.
        return replace(found, reaches=found.extent.stop > self.extent.stop)

    def load(self, layout: Any = None) -> Block:
        self.memory.loaded[getcurrent()].add(self.extent)
        return Loaded(self.memory, self.extent, self.read())

    def copy(self, value: torch.Tensor | None) -> None:
        """TMA's write; None: what comes is on its way."""
        if value is None:
            self.memory.copied.append(self.extent)
            self.memory.bytes[self.extent.start : self.extent.stop] = 255
        else:
            self.write(value)

    def store(self, value: Block) -> None:
        self.write(value.data)
        self.memory.unfenced.setdefault(getcurrent(), []).append(self.extent)

    def read_by_product(self) -> torch.Tensor:
        for stored in chain.from_iterable(self.memory.unfenced.values()):
            assert _apart(stored, self.extent), "a product reads what was stored without a fence"
        return self.read()

    def read(self) -> torch.Tensor:
        found = self._lines().reshape(self.shape).view(self.dtype.torch)
        return found.T if self.transposed else found

    def write(self, value: torch.Tensor) -> None:
        value = value.T if self.transposed else value
        assert list(value.shape) == self.shape
        assert value.dtype == self.dtype.torch
        lines = self._lines()
        lines.copy_(value.contiguous().view(lines.dtype).view(lines.shape))

    @property
    def extent(self) -> range:
        """Its bytes."""
        num_bytes = torch.Size(self.shape).numel() * self.dtype.torch.itemsize
        return range(self.begin, self.begin + num_bytes)

    def _lines(self) -> torch.Tensor:
        """Its bits [rows, lines of a row, elements of a line], where they lie."""
        own, size = self.extent, self.dtype.torch.itemsize
        rows, columns = torch.Size(self.shape[:-1]).numel(), self.shape[-1]
        line = min(columns, self.line // size or columns)
        assert len(self.shape) == 2 or columns == line, "index a tile before it is read"
        bits = self.memory.bytes[own.start : own.stop].view(_BITS[size])
        return bits.view(columns // line, rows, line).transpose(0, 1)


def line_bytes(layout: Any) -> int:
    """Bytes of the lines that stand under each other in shared memory."""
    return getattr(layout, "swizzle_byte_width", 0)


class Barrier:
    """A barrier in shared memory."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phases = 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        assert arrivals <= self.left, "more arrivals than a phase has"
        self.left -= arrivals
        self.bytes += num_bytes
        if not self.left and not self.bytes:
            self.phases += 1
            self.left = self.count

    def is_done(self, parity: int) -> bool:
        return self.phases % 2 != parity


class Product:
    """A product on its way, and the sum that it is added to.

    Attributes:
        sums: once it has ended.
    """

    def __init__(self, a: Any, b: Any, acc: Any) -> None:
        self._operands, self._acc = (a, b), acc
        self._read = [_read(one) for one in self._operands]
        self.sums: Block | None = None

    @property
    def has_ended(self) -> bool:
        return self.sums is not None

    def end(self) -> None:
        a, b = map(_read_throughout, self._operands, self._read)
        before = self._acc.sums if isinstance(self._acc, Product) else self._acc
        self.sums = Block((a @ b + (0 if before is None else before.data.double())).float())


def _read(operand: Any) -> torch.Tensor:
    return operand.read_by_product() if isinstance(operand, Shared) else operand.data


def _read_throughout(operand: Any, before: torch.Tensor) -> torch.Tensor:
    """What was read at first and is still there, in fp64; NaN where a view reached too far."""
    same = _bits(before) == _bits(_read(operand))
    reaches = isinstance(operand, Shared) and operand.reaches
    assert reaches or same.all(), "what a product reads changed meanwhile"
    return torch.where(same, before.double(), torch.nan)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(_BITS[values.itemsize])

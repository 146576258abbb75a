"""Handles of memory as vLLM's trainers send them: a pickle, which is read and never run.

Its opcodes build strings, numbers, bytes, tuples, lists and dicts here. What the pickle names
(torch's classes, dtypes and one function) stays a name, and nothing is imported or called. A handle
is then checked field by field.
"""

from __future__ import annotations

import base64
import pickletools
import re
from collections.abc import Callable, Mapping
from typing import Any

from sametoken.types.weight_updates import MemoryHandle

Handles = Mapping[str, MemoryHandle]

_SIZE, _DTYPES = "torch.Size", "torch."
_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")
_STORAGES = ("torch.storage.TypedStorage", "torch.storage.UntypedStorage")
#: vLLM before 0.28 sends it with its arguments.
_REBUILD = "torch.multiprocessing.reductions.rebuild_cuda_tensor"
#: Names of torch's shared memory, where counters are; so none in other memory is changed.
_COUNTERS = re.compile(rb"/torch_[0-9]{1,20}_[0-9]{1,20}_[0-9]{1,20}")
#: Of host memory, which is not counted.
_PATH = re.compile(rb"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")
#: Counters in one piece of shared memory, bytes of CUDA's event, and of any handle of memory.
_MAX_INDEX, _EVENT_BYTES, _MAX_MEMORY_BYTES, _MAX_NUMBER = 10_000, 64, 4096, 2**48
_MAX_DIMENSIONS = 8
#: Characters of a name, and handles: what a pickle repeats takes few of its bytes.
_MAX_NAME, _MAX_HANDLES = 256, 2**20


def read_handles(encoded: str) -> tuple[Handles, ...] | Handles:
    """Handles by device: of each tensor, or of one buffer.

    Args:
        encoded: base64 of the pickle.

    Raises:
        ValueError: it is something else; nothing of it was run.
    """
    try:
        found = _Machine().run(base64.b64decode(encoded, validate=True))
        if isinstance(found, dict):
            return _by_device(found)
        if isinstance(found, list) and sum(map(len, found)) <= _MAX_HANDLES:
            return tuple(_by_device(one) for one in found)
    except Exception as error:
        raise ValueError("these are no handles of torch's") from error
    raise ValueError("these are no handles of torch's")


def _by_device(found: Any) -> Handles:
    return {device: _handle(fields) for device, fields in found.items()}


def _handle(fields: Any) -> MemoryHandle:
    """Check the arguments of ``rebuild_cuda_tensor``."""
    if len(fields) == 2 and fields[0] == _REBUILD:
        fields = fields[1]
    match fields:
        case (
            str() as tensor,
            tuple() as shape,
            tuple() as strides,
            int() as offset,
            str() as storage,
            str() as dtype,
            int(),
            bytes() as memory,
            int() as num_bytes,
            int() as first_byte,
            bool(),
            bytes() as counter,
            int() as index,
            bytes() as event,
            bool() as waits,
        ):
            numbers = (*shape, *strides, offset, num_bytes, first_byte)
            fits = (
                tensor in _TENSORS
                and storage in _STORAGES
                and dtype.startswith(_DTYPES)
                and len(shape) == len(strides) <= _MAX_DIMENSIONS
                and all(type(one) is int and 0 <= one < _MAX_NUMBER for one in numbers)
                and _fits_memory(memory, counter)
                and 0 <= index < _MAX_INDEX
                and len(event) in (0, _EVENT_BYTES)
            )
            if fits:
                name = dtype.removeprefix(_DTYPES)
                place = (offset, memory, num_bytes, first_byte, counter, index, event, waits)
                return MemoryHandle(name, shape, strides, *place)
    raise ValueError("a handle has other fields")


def _fits_memory(memory: bytes, counter: bytes) -> bool:
    """Whether it is host memory, or CUDA's with its counters."""
    if not counter:
        return _PATH.fullmatch(memory) is not None
    return 0 < len(memory) <= _MAX_MEMORY_BYTES and _COUNTERS.fullmatch(counter) is not None


class _Machine:
    """Builds what the opcodes of a pickle of plain data build."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def run(self, pickled: bytes) -> Any:
        """The value of a pickle; errors of any kind if it has other opcodes, or is broken."""
        for opcode, argument, _ in pickletools.genops(pickled):
            _OPCODES[opcode.name](self, argument)
        return self._stack.pop()

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def memoize(self, _: Any) -> None:
        self._memo.append(self._stack[-1])

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def tuple_of(self, items: list[Any]) -> None:
        self._stack.append(tuple(items))

    def name(self, _: Any) -> None:
        module, name = self.last(2)
        is_text = isinstance(module, str) and isinstance(name, str)
        if not is_text or len(module) + len(name) > _MAX_NAME:
            raise ValueError("it names something else")
        self._stack.append(f"{module}.{name}")

    def size(self, _: Any) -> None:
        """A call: only of ``torch.Size``, whose argument is its value."""
        called, (numbers,) = self.last(2)
        if called != _SIZE or len(numbers) > _MAX_DIMENSIONS:
            raise ValueError("it calls something else")
        self._stack.append(tuple(numbers))

    def extend(self, items: list[Any]) -> None:
        self._stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise TypeError("a key is no text")
            self._stack[-1][key] = value

    def last(self, count: int) -> list[Any]:
        return self.above(len(self._stack) - count)

    def marked(self) -> list[Any]:
        return self.above(self._marks.pop())

    def above(self, first: int) -> list[Any]:
        if first < 0:
            raise IndexError("its stack is empty")
        found = self._stack[first:]
        del self._stack[first:]
        return found


_Act = Callable[[_Machine, Any], None]
_OPCODES: dict[str, _Act] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(
        (
            *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
            *("BININT", "BININT1", "BININT2", "LONG1"),
        ),
        _Machine.push,
    ),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _Machine.mark,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE1": lambda machine, _: machine.tuple_of(machine.last(1)),
    "TUPLE2": lambda machine, _: machine.tuple_of(machine.last(2)),
    "TUPLE3": lambda machine, _: machine.tuple_of(machine.last(3)),
    "TUPLE": lambda machine, _: machine.tuple_of(machine.marked()),
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.size,
    "APPEND": lambda machine, _: machine.extend(machine.last(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.marked()),
    "SETITEM": lambda machine, _: machine.update(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.marked()),
}

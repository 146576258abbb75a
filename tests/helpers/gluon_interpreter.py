"""Kernels in Gluon on a CPU, in Python: Triton's interpreter has none for them.

Kernels run unchanged. While ``interpreted`` lasts, the names by which their modules know Gluon's
language, each other's functions and constants stand for what is here. Blocks are torch's tensors,
layouts of registers mean nothing, and shared memory is bytes that are NaN at first.

Partitions of a program run one at a time and change turns where they wait or arrive, at random, so
that a barrier too few shows. TMA's copies come at a random time between their start and the phase
that they complete, those of threads as late as they may (``gluon_copies``); what they will cover is
NaN meanwhile, and no load may be in flight there, as it is until its value is used. Products read
shared memory when they start, behind a fence, and again when they are waited for, when it must be
what it was. A product is exact and rounded once, so forms that sum the same tiles in the same order
have equal bits, on a chip other ones.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from functools import reduce as folded
from itertools import product
from operator import add
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from greenlet import getcurrent
from triton.experimental.gluon import language as real
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from helpers.gluon_blocks import (
    Block,
    Dtype,
    Pointer,
    atomic_add,
    block,
    load,
    number_or_block,
    plain,
    store,
)
from helpers.gluon_copies import Copies
from helpers.gluon_program import Program
from helpers.gluon_ptx import evaluated
from helpers.gluon_shared import Barrier, Descriptor, Memory, Product, Shared, line_bytes

TYPES = {
    "int32": torch.int32, "int64": torch.int64, "float32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float8e4nv": torch.float8_e4m3fn,
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32,
}  # fmt: skip


#: Threads of a warp.
WARP = 32


class Interpreter:
    """The language, for the program that runs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.program: Program | None = None
        self.copies = Copies()
        self._memories: list[Memory] = []

    def allocate_shared_memory(self, dtype: Dtype, shape: list[int], layout: Any) -> Any:
        if isinstance(layout, _Barriers):
            return SimpleNamespace(index=[Barrier() for _ in range(int(shape[0]))].__getitem__)
        shape = [*map(int, shape)]
        memory = Memory(torch.Size(shape).numel() * dtype.torch.itemsize)
        self._memories.append(memory)
        return Shared(memory, 0, dtype, shape, line_bytes(layout))

    def fence(self) -> None:
        for memory in self._memories:
            memory.fence()

    def meet(self) -> None:
        """A barrier of a program's threads."""
        self.copies.meet()
        for memory in self._memories:
            memory.loaded.pop(getcurrent(), None)

    def load_box(self, memory: Descriptor, at: list[Any], barrier: Barrier, into: Shared) -> None:
        data = memory.read(at)
        into.copy(None)

        def arrive() -> None:
            into.copy(data)
            barrier.arrive(num_bytes=-data.nbytes)

        self.program.copies.append(arrive)

    def arrive_behind_copies(self, barrier: Barrier, *, increment_count: bool) -> None:
        """Let a warp's threads arrive, once their copies are there."""
        assert not increment_count
        begun = self.copies.take()

        def arrive() -> None:
            for copy in begun:
                copy()
            barrier.arrive(WARP)

        self.program.copies.append(arrive)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        parity = int(phase)
        self.program.wait(lambda: barrier.is_done(parity))

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        barrier.arrive(count)
        self.give_way()

    def give_way(self) -> None:
        """Often, let others have their turns."""
        self.program.wait(lambda: True)

    def stand_at(self, place: tuple[int, ...], grid: tuple[int, ...]) -> None:
        """Be a program, for functions that ask which one they are called in."""
        self._memories = []
        self.copies.drop()
        self.program = Program(place, grid, self.random.randrange(1 << 30))

    def multiply(
        self, a: Any, b: Any, acc: Any, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        assert is_async
        product = Product(a, b, acc if use_acc else None)
        self.program.products[getcurrent()].append(product)
        return product

    def end_products(self, pendings: int, deps: tuple[Any, ...]) -> Any:
        """End all products of a partition but the last; sums stand for those that have ended."""
        self.give_way()
        under_way = self.program.products[getcurrent()]
        while len(under_way) > pendings:
            under_way.pop(0).end()
        found = [one.sums if isinstance(one, Product) and one.has_ended else one for one in deps]
        return found[0] if len(found) == 1 else tuple(found)

    def launch(self, function: Callable[..., None], grid: tuple[int, ...], given: Any) -> None:
        places = [*product(*map(range, grid))]
        self.random.shuffle(places)
        for place in places:
            self.stand_at(place, grid)
            function(**given)


class _Integer(int):
    """A constant of a module, which constexpr functions ask for its value."""

    @property
    def value(self) -> int:
        return int(self)


class _Barriers:
    """The layout of barriers."""


def fma(a: Any, b: Any, c: Any) -> Block:
    a, b, c = (torch.as_tensor(plain(one)).double() for one in (a, b, c))
    return Block((a * b + c).float())


def _in_double(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Block]:
    # In fp32 torch's vectors and the numbers that are left over may differ by a bit.
    return lambda values: Block(function(block(values).data.double()).float())


def associative_scan(values: Block, axis: int, combine: Any) -> Block:
    assert combine(1, 2) == 3
    return Block(values.data.cumsum(axis).to(values.data.dtype))


def reduce(values: tuple[Block, ...], axis: int, combine: Any) -> tuple[Any, ...]:
    """Fold along the axis, all places beside it at once: numbers in its order, integers by halves.

    Integers have the same result in any order, and halves take fewer steps.
    """
    data = [one.data.movedim(axis, 0) for one in values]
    if any(one.is_floating_point() for one in data):
        blocks = (tuple(map(Block, one)) for one in zip(*data, strict=True))
        return folded(lambda before, one: combine(*before, *one), blocks)
    while (half := len(data[0]) // 2) > 0:
        low, high = ([Block(one[at : at + half]) for one in data] for at in (0, half))
        found = combine(*low, *high)
        data = [
            torch.cat((one.data, all_of[2 * half :]))
            for one, all_of in zip(found, data, strict=True)
        ]
    return tuple(number_or_block(one[0]) for one in data)


def extreme(values: Block, axis: int, sign: int) -> Block:
    """The smallest or the largest; as on a chip NaN counts only where there is nothing else."""
    data = values.data
    if not data.is_floating_point():
        return number_or_block(data.amin(axis) if sign > 0 else data.amax(axis))
    data = torch.where(data.isnan(), sign * torch.inf, data)
    found = data.amin(axis) if sign > 0 else data.amax(axis)
    return Block(torch.where(values.data.isnan().all(axis), torch.nan, found))


def total(values: Block, axis: int) -> Block:
    """A sum as of ``reduce``; over the rows of a warp group's products in the order of a chip.

    It adds rows of a thread, of a warp, then of the group: bits 3, 2, 1, 0, 5 and 4 of the row.
    """
    data = values.data
    if not data.is_floating_point():
        return number_or_block(data.sum(axis).to(data.dtype))
    if axis or data.shape[0] != 64:
        return Block(folded(add, data.unbind(axis)))
    data = data.reshape(2, 2, 2, 2, 2, 2, *data.shape[1:])
    for bit in (2, 2, 2, 2, 0, 0):
        data = data.select(bit, 0) + data.select(bit, 1)
    return Block(data)


def _of_both(
    function: Callable[..., torch.Tensor], of_integers: Callable[..., int]
) -> Callable[[Any, Any], Block]:
    def apply(a: Any, b: Any) -> Block:
        a, b = plain(a), plain(b)
        if isinstance(a, int) and isinstance(b, int):
            return Block(of_integers(a, b))
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return Block(function(a, b.to(a.dtype) if a.dim() > b.dim() else b))

    return apply


def _assert(condition: bool, message: str = "") -> None:
    assert condition, message


def where(condition: Any, a: Any, b: Any) -> Block:
    return Block(torch.where(block(condition).data, plain(a), plain(b)))


def language(interpreter: Interpreter) -> SimpleNamespace:
    """Gluon's language, or the part of it that kernels use."""
    nothing = dict.fromkeys(
        ("BlockedLayout", "SliceLayout", "DotOperandLayout", "SwizzledSharedLayout",
         "DistributedLinearLayout", "NVMMADistributedLayout"),
        lambda *_, **__: None,
    )  # fmt: skip
    types = {name: Dtype(one) for name, one in TYPES.items()}

    def filled(shape: list[int], value: float, dtype: Dtype, layout: Any = None) -> Block:
        return Block(torch.full([*map(int, shape)], value, dtype=dtype.torch))

    return SimpleNamespace(
        **nothing, **types, constexpr=lambda value: value, static_range=range,
        static_assert=_assert,
        NVMMASharedLayout=real.NVMMASharedLayout,
        allocate_shared_memory=interpreter.allocate_shared_memory,
        warp_specialize=lambda functions, *_: interpreter.program.run_partitions(
            [partial(function, *arguments) for function, arguments in functions]),
        program_id=lambda axis: Block(interpreter.program.place[axis]),
        num_programs=lambda axis: interpreter.program.grid[axis],
        load=load, store=store, atomic_add=atomic_add,
        split=lambda values: values.split(), fma=fma, where=where,
        associative_scan=associative_scan, reduce=reduce, sum=total,
        arange=lambda begin, end, layout=None: Block(
            torch.arange(begin, end, dtype=torch.int32)),
        full=filled,
        zeros=lambda shape, dtype, layout=None: filled(shape, 0, dtype),
        zeros_like=lambda values: Block(torch.zeros_like(values.data)),
        full_like=lambda values, value: Block(torch.full_like(values.data, value)),
        expand_dims=lambda values, axis: Block(values.data.unsqueeze(axis)),
        broadcast=lambda *values: [
            *map(Block, torch.broadcast_tensors(*(one.data for one in values)))],
        inline_asm_elementwise=lambda code, constraints, words, **_: evaluated(code, words),
        reshape=lambda values, shape: values.reshape(shape),
        permute=lambda values, order: values.permute(order),
        thread_barrier=interpreter.meet, to_tensor=lambda value: value,
        convert_layout=lambda values, layout, **_: values,
        exp=_in_double(torch.exp), exp2=_in_double(torch.exp2),
        max=lambda values, axis: extreme(values, axis, -1),
        min=lambda values, axis: extreme(values, axis, 1),
        maximum=_of_both(torch.fmax, max), minimum=_of_both(torch.fmin, min),
        join=lambda a, b: Block(torch.stack((a.data, b.data), -1)),
    )  # fmt: skip


class Kernel:
    """A kernel that is launched in Python."""

    def __init__(self, interpreter: Interpreter, function: Any) -> None:
        self._interpreter, self._function = interpreter, function

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        return self._function(*arguments, **constants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            # Few of all kernels are launched: the others' parameters need no look.
            names = list(inspect.signature(self._function).parameters)
            given = {name: constants[name] for name in names if name in constants}
            given |= dict(zip(names, map(_argument, arguments), strict=False))
            self._interpreter.launch(self._function, (*map(int, grid), 1, 1)[:3], given)

        return launch


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(
            value.as_strided(
                (value.untyped_storage().nbytes() // value.itemsize - value.storage_offset(),), (1,)
            )
        )
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    return Block(value) if isinstance(value, int) else value


@contextmanager
def interpreted(seed: int = 0, *, also: ModuleType | None = None) -> Iterator[Interpreter]:
    """Launch kernels in Gluon, and what they share with Triton's, in Python while this lasts.

    Their functions can be called with numbers and tensors, too (``Block``, ``Pointer``).

    Args:
        seed: of the order of programs, of partitions' turns and of copies.
        also: a module with kernels, beside those of ``sametoken.ops``.
    """
    interpreter = Interpreter(seed)
    gluon = language(interpreter)
    barriers = SimpleNamespace(
        MBarrierLayout=_Barriers, wait=interpreter.wait,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, num_bytes: barrier.arrive(1, int(num_bytes)),
        arrive=interpreter.arrive,
    )  # fmt: skip

    copies = SimpleNamespace(
        async_copy_global_to_shared=interpreter.copies.begin,
        commit_group=interpreter.copies.commit, wait_group=interpreter.copies.wait,
        mbarrier_arrive=interpreter.arrive_behind_copies,
    )  # fmt: skip
    stand_ins = {
        "gl": gluon, "tl": gluon, "mbarrier": barriers, "load_box": interpreter.load_box,
        "async_copy": copies, "copy_to_shared": interpreter.copies.begin,
        "cuda": SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None),
        "warpgroup_mma": interpreter.multiply, "warpgroup_mma_wait": interpreter.end_products,
        "fence_async_shared": interpreter.fence, "barrier": interpreter.meet,
    }  # fmt: skip
    before: list[tuple[Any, str, Any]] = []
    try:
        for name, module in list(sys.modules.items()):
            if not name.startswith("sametoken.ops") and module is not also:
                continue
            for key, value in list(vars(module).items()):
                if isinstance(value, JITFunction | InterpretedFunction):
                    new: Any = Kernel(interpreter, value.fn)
                elif isinstance(value, real.constexpr):
                    new = _Integer(value.value) if isinstance(value.value, int) else value.value
                elif key in stand_ins and _is_language(value):
                    new = stand_ins[key]
                else:
                    continue
                before.append((module, key, value))
                setattr(module, key, new)
        yield interpreter
    finally:
        for module, key, value in before:
            setattr(module, key, value)


def _is_language(value: Any) -> bool:
    home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return "triton" in home

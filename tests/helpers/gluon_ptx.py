"""The few PTX instructions of kernels in Gluon that run in Python (``gluon_interpreter``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch

from helpers.gluon_blocks import Block

_ALL = 0xFFFF_FFFF


def evaluated(code: str, words: list[Block]) -> Block:
    """``$0`` after PTX over registers of 32 bits, of blocks of words ``$1`` and up."""
    given = torch.broadcast_tensors(*(one.data.long() & _ALL for one in words))
    registers = {f"${place}": one for place, one in enumerate(given, 1)}
    for line in code.strip(" {}\n").split(";"):
        name, *operands = re.split(r"[\s,]+", line.strip())
        if name not in ("", ".reg"):
            values = [_value(one, registers) for one in operands[1:]]
            registers[operands[0]] = _INSTRUCTIONS[name](*values)
    return Block(registers["$0"].to(torch.uint32))


def _value(operand: str, registers: dict[str, torch.Tensor]) -> torch.Tensor:
    return registers[operand] if operand in registers else torch.tensor(int(operand, 0))


def _lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Bit 4 a + 2 b + c of the table, for each bit."""
    found = torch.zeros_like(a)
    for place in range(8):
        if int(table) >> place & 1:
            bits = (one ^ (0 if place & 4 >> i else _ALL) for i, one in enumerate((a, b, c)))
            found |= next(bits) & next(bits) & next(bits)
    return found


def _fma(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of both halves of words, rounded once."""
    a, b, c = (_halves(one, dtype) for one in torch.broadcast_tensors(a, b, c))
    times = a * b
    total = times + c
    added = total - times
    lost = (times - (total - added)) + (c - added)
    # An inexact sum has an odd last bit in fp32, so it is no tie when it is rounded again.
    found = total.float()
    rest = (total - found.double()) + lost
    is_even = found.view(torch.int32) & 1 == 0
    odd = torch.nextafter(found, torch.where(rest > 0, torch.inf, -torch.inf))
    rounded = torch.where(is_even & (rest != 0), odd, found).to(dtype)
    return rounded.view(torch.uint32).squeeze(-1).long()


def _halves(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return words.to(torch.uint32).contiguous().unsqueeze(-1).view(dtype).double()


_INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, places: a >> places,
    "shl.b32": lambda a, places: a << places & _ALL,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": partial(_fma, torch.bfloat16),
    "fma.rn.f16x2": partial(_fma, torch.float16),
}

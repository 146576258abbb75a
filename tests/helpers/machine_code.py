"""What Hopper's machine code may not do: write registers that a product still reads.

A matrix unit reads its left operand from registers while the program goes on. Triton and ptxas
made the next operand, or anything else, in them before the product had to be done
(triton-lang/triton#9433): results depended on how long the unit took.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from triton import knobs

#: Place, operation and operands of an instruction.
Instruction = tuple[str, str, str]

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.x]+)\s*(.*?)\s*;\s*$")
_LABEL = re.compile(r"(\.L_x_\d+):")
#: Of 16 bits and of float8.
_PRODUCTS = ("HGMMA", "QGMMA")
#: Their first register is an address or a value that they read.
_WRITE_NO_REGISTER = ("ST", "RED", "LDGSTS", "SYNCS", "UTMA", "BRA", "BAR", "WARPGROUP", "R2UR")


def _instructions(cubin: Path) -> tuple[list[Instruction], dict[str, int]]:
    command = [knobs.nvidia.nvdisasm.path, str(cubin)]
    code, labels = [], {}
    for line in subprocess.check_output(command, text=True).splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _LINE.match(line):
            code.append(instruction.groups())
    return code, labels


def _paths(code: list[Instruction], labels: dict[str, int]) -> Iterator[list[Instruction]]:
    """The whole code, and every loop twice in a row."""
    yield code
    for end, (_, operation, operands) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands) if operation.startswith("BRA") else None
        if target and labels.get(target[0], len(code)) <= end:
            yield 2 * code[labels[target[0]] : end + 1]


def _registers(operand: str, count: int) -> set[int]:
    first = re.match(r"R(\d+)", operand.strip())
    return set(range(int(first[1]), int(first[1]) + count)) if first else set()


def _written(operation: str, operands: str) -> set[int]:
    if operation.startswith(_WRITE_NO_REGISTER):
        return set()
    if operation.startswith(_PRODUCTS):
        return _registers(operands, int(re.search(r"64x(\d+)x", operation)[1]) // 2)
    count = 4 if ".128" in operation else 2 if ".64" in operation or "WIDE" in operation else 1
    return _registers(operands.split(",")[0], count)


def _overwritten(path: list[Instruction]) -> Iterator[str]:
    groups, last = [], []
    for place, operation, operands in path:
        if operation.startswith("WARPGROUP.DEPBAR"):
            pending = int(re.search(r"0x[0-9a-f]+", operands)[0], 16)
            groups = groups[len(groups) - pending :] if pending else []
            continue
        written = _written(operation, operands)
        for product, read in (one for group in (*groups, last) for one in group):
            if written & read:
                yield f"{operation} at {place} writes what the product at {product} reads"
        if operation.startswith(_PRODUCTS):
            last.append((place, _registers(operands.split(",")[1], 4)))
            if "gsb0" in operands:
                groups, last = [*groups, last], []


def overwritten_operands(cubin: Path) -> list[str]:
    """Instructions that write registers which a product before them may still read."""
    code, labels = _instructions(cubin)
    return [found for path in _paths(code, labels) for found in _overwritten(path)]

"""What Hopper's machine code may not do: write registers that a product still reads.

A matrix unit reads its left operand from registers while the program goes on. Triton and ptxas
made the next operand, or anything else, in them before the product had to be done
(triton-lang/triton#9433): results depended on how long the unit took.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile

from triton import knobs

#: Place, operation and operands of an instruction.
Instruction = tuple[int, str, str]

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.x]+)\s*(.*?)\s*;\s*$")
#: Of an instruction.
_NUM_BYTES = 16
#: Of 16 bits and of float8.
_PRODUCTS = ("HGMMA", "QGMMA")
#: Their first register is an address or a value that they read.
_WRITE_NO_REGISTER = ("ST", "RED", "LDGSTS", "SYNCS", "UTMA", "BRA", "BAR", "WARPGROUP", "R2UR")


def disassembled(cubins: list[Path]) -> list[list[Instruction]]:
    """The instructions of each kernel, by one process, which takes half a second to start."""
    codes = [_code(cubin) for cubin in cubins]
    with NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--binary", "SM90a", file.name]
        text = subprocess.check_output(command, text=True)
    matches = (_LINE.match(line) for line in text.splitlines())
    instructions = [(int(found[1], 16), found[2], found[3]) for found in matches if found]
    ends = accumulate(len(code) // _NUM_BYTES for code in codes)
    assert len(instructions) == sum(len(code) for code in codes) // _NUM_BYTES
    return [
        instructions[end - len(code) // _NUM_BYTES : end]
        for end, code in zip(ends, codes, strict=True)
    ]


def _code(cubin: Path) -> bytes:
    """The sections of an ELF file that hold instructions."""
    elf = cubin.read_bytes()
    (headers,) = struct.unpack_from("<Q", elf, 40)
    size, count, of_names = struct.unpack_from("<3H", elf, 58)
    sections = [struct.unpack_from("<2I4Q", elf, headers + i * size) for i in range(count)]
    names = sections[of_names][4]
    return b"".join(
        elf[start : start + length]
        for name, _, _, _, start, length in sections
        if elf.startswith(b".text.", names + name)
    )


def _paths(code: list[Instruction]) -> Iterator[list[Instruction]]:
    """The whole code, and every loop twice in a row."""
    yield code
    for end, (place, operation, operands) in enumerate(code):
        target = re.search(r"0x[0-9a-f]+$", operands) if operation.startswith("BRA") else None
        if target and int(target[0], 16) <= place:
            begin = end - (place - int(target[0], 16)) // _NUM_BYTES
            yield 2 * code[begin : end + 1]


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
                yield f"{operation} at {place:x} writes what the product at {product:x} reads"
        if operation.startswith(_PRODUCTS):
            last.append((place, _registers(operands.split(",")[1], 4)))
            if "gsb0" in operands:
                groups, last = [*groups, last], []


def found_in(code: list[Instruction]) -> list[str]:
    """Instructions that write registers which a product before them may still read."""
    return [found for path in _paths(code) for found in _overwritten(path)]


def overwritten_operands(cubins: list[Path]) -> list[str]:
    """``found_in`` each kernel, by its name."""
    codes = zip(cubins, disassembled(cubins), strict=True)
    return [f"{cubin.stem}: {found}" for cubin, code in codes for found in found_in(code)]

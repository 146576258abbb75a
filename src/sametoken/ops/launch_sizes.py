"""Sizes of launches in plain Python; Triton's functions of these names take microseconds each."""

from __future__ import annotations

#: Eager steps of a GPU are padded to this multiple: fewer row counts to prove and kernels to
#: compile.
ROW_MULTIPLE = 64


def cdiv(number: int, divisor: int) -> int:
    """``number / divisor``, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two from ``number`` on, which is at least 1."""
    return 1 << (number - 1).bit_length()

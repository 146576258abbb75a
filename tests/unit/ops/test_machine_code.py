"""The reader of machine code finds what it is there for."""

from __future__ import annotations

import pytest

from helpers.machine_code import found_in

PRODUCT = "HGMMA.64x32x16.F32.BF16", "R24, R8, gdesc[UR4], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE", "gsb0, 0x0"
WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE", "gsb0, 0x1"
OPERAND, OTHER = ("MOV", "R11, R40"), ("MOV", "R12, R40")
LOOP = "BRA", "0x0"


@pytest.mark.parametrize(
    ("code", "finds"),
    [
        ((PRODUCT, OPERAND, WAIT), True),
        ((PRODUCT, OTHER, WAIT), False),
        ((PRODUCT, WAIT, OPERAND), False),
        ((PRODUCT, WAIT_BUT_ONE, OPERAND), True),
        ((PRODUCT, PRODUCT, WAIT_BUT_ONE, OPERAND), True),
        ((OPERAND, PRODUCT, LOOP, WAIT), True),
        ((OPERAND, PRODUCT, WAIT, LOOP), False),
    ],
)
def test_a_register_that_a_product_still_reads_is_found(code, finds):
    placed = [(16 * i, *instruction) for i, instruction in enumerate(code)]
    assert bool(found_in(placed)) == finds

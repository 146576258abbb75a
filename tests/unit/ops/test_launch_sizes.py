"""Sizes of launches are those that Triton's own functions give."""

from __future__ import annotations

import triton

from sametoken.ops.launch_sizes import cdiv, next_power_of_2


def test_sizes_are_tritons():
    for number in range(1, 70):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for divisor in (1, 2, 16, 48):
            assert cdiv(number, divisor) == triton.cdiv(number, divisor)
    assert cdiv(0, 16) == 0

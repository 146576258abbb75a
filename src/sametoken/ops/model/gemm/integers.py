"""The product of a matrix of integers with activations in 8 bits, in plain PyTorch.

What the C kernel computes, to the bit (docs/decisions/0029-products-of-quantized-weights.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.ops.weight import IntegerMatrix

#: Neighbouring activations of a row that share a scale.
WIDTH = 32

#: The code of a group's largest activation.
LARGEST = 127.0

#: Lower bound of a group's largest activation, so that its inverse is finite.
TINY = 2.0**-100


def rounded_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round [T, K] by groups of ``WIDTH``, to nearest even; the last group may be shorter.

    Returns:
        Codes from -127 to 127 as fp32, [T, groups, WIDTH], zero padded, and scales [T, groups, 1].
        A group with NaN or an infinity has zeros and a scale of NaN.
    """
    values = F.pad(x.float(), (0, -x.shape[1] % WIDTH)).unflatten(1, (-1, WIDTH))
    largest = values.abs().amax(dim=2, keepdim=True).clamp(min=TINY)
    finite, unit = largest.isfinite(), torch.full_like(largest, LARGEST)
    # Tensors on both sides: a division by a number may be a product with its reciprocal.
    codes = torch.where(finite, (values * (unit / largest)).round(), 0.0)
    return codes, torch.where(finite, largest / unit, torch.nan)


def product(x: Tensor, matrix: IntegerMatrix) -> Tensor:
    """Sums of rounded activations and a matrix: [T, K] -> [T, N] fp32.

    Sums of a group's codes are integers below 2^24, so fp32 holds them whatever their order.
    """
    codes, scales = rounded_to_int8(x)
    count = matrix.scale.shape[1]
    rows = codes.flatten(1)[:, : x.shape[1]].unflatten(1, (count, -1)).transpose(0, 1)
    numbers = matrix.codes.float().unflatten(1, (count, -1)).permute(1, 2, 0)
    of_rows = rows.sum(dim=2, keepdim=True)
    sums = rows @ numbers - matrix.zero * of_rows
    total = x.new_zeros(x.shape[0], matrix.codes.shape[0], dtype=torch.float32)
    for group in range(count):
        value = sums[group] * matrix.scale[:, group].float()
        if matrix.minimum is not None:
            value += of_rows[group] * matrix.minimum[:, group].float()
        total += value * scales[:, group * matrix.width // WIDTH]
    return total

"""MXFP4 stacks of experts (OCP Microscaling Formats): expanded as they are read, to the bit.

32 adjacent features of a row share a scale, a power of two (E8M0: 2^(byte - 127)). A feature is a
number of e2m1, two in a byte, the first in its low half. Their product has at most two significant
bits, so bf16 holds it, whatever the scale, up to ``MAX_SCALE``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.models.load.weights import Part, TensorSource, WeightReader

#: Features that share a scale.
GROUP = 32
#: The largest byte of a scale: 6 * 2^125 is bf16's last product with every number; 255 is NaN.
MAX_SCALE = 252
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4Stack:
    """``StackFormat`` of gpt-oss: ``{stack}_blocks`` and ``{stack}_scales``, both uint8.

    Blocks are [experts, rows, in_features / 32, 16], scales [experts, rows, in_features / 32].
    """

    def covers(self, source: TensorSource, stack: str) -> bool:
        """Whether either of the two is there."""
        names = source.names()
        return f"{stack}_blocks" in names or f"{stack}_scales" in names

    def matrices(
        self, reader: WeightReader, count: int, in_features: int, part: Part
    ) -> Iterator[Tensor]:
        """See ``StackFormat``: fp32 on the reader's device."""
        if in_features % GROUP:
            raise CheckpointError(
                f"{reader.source.location}: {part.name} has rows of {in_features} features, in "
                f"MXFP4 no multiple of {GROUP}",
                "check that config and weights belong together",
            )
        groups = in_features // GROUP
        names = (f"{part.name}_blocks", f"{part.name}_scales")
        shapes = ((part.rows, groups, GROUP // 2), (part.rows, groups))
        blocks, scales = (
            reader.filled((Part(name, count),), shape, torch.uint8)
            for name, shape in zip(names, shapes, strict=True)
        )
        if (found := int(scales.max())) > MAX_SCALE:
            raise CheckpointError(
                f"tensor {names[1]} of {reader.source.location} holds the scale {found}, above "
                f"{MAX_SCALE}, whose weights bf16 cannot hold",
                "download or convert the checkpoint again",
            )
        for own_blocks, own_scales in zip(blocks, scales, strict=True):
            yield expanded(own_blocks, own_scales)


def expanded(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, groups, 16] blocks and [rows, groups] scales to [rows, in_features] in fp32."""
    powers = [2.0 ** (byte - 127) for byte in range(MAX_SCALE + 1)]
    by_group = torch.tensor(powers, device=blocks.device)[scales.int()]
    return (e2m1(blocks) * by_group.unsqueeze(-1)).flatten(1)


def e2m1(packed: Tensor) -> Tensor:
    """Numbers of e2m1 in fp32, two of each byte, the low half first: [..., n] to [..., 2n]."""
    numbers = torch.tensor((*_E2M1, *(-number for number in _E2M1)), device=packed.device)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1)
    return numbers[halves.int()].flatten(-2)

"""MXFP4 stacks of experts (OCP Microscaling Formats), kept in their bits.

32 adjacent features of a row share a scale, a power of two (E8M0: 2^(byte - 127)). A feature is a
number of e2m1, two in a byte, the first in its low half. Their product has at most two significant
bits, so bf16 holds it, whatever the scale, up to ``MAX_SCALE``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.models.load.sources import TensorSource
from sametoken.models.load.weights import Part, WeightReader
from sametoken.ops.model.gemm.int4 import E2M1, packed_int4
from sametoken.ops.weight import Int4Matrix, Weight

#: Features that share a scale.
GROUP = 32
#: The largest byte of a scale: 6 * 2^125 is bf16's last product with every number; 255 is NaN.
MAX_SCALE = 252


@dataclass(frozen=True, slots=True)
class Mxfp4Stack:
    """``StackFormat`` of gpt-oss: ``{stack}_blocks`` and ``{stack}_scales``, both uint8.

    Blocks are [experts, rows, in_features / 32, 16], scales [experts, rows, in_features / 32]. A
    rank whose columns are no whole groups has them expanded, which is exact in bf16.
    """

    def covers(self, source: TensorSource, stack: str) -> bool:
        """Whether either of the two is there, or no tensor of another format."""
        names = source.names()
        return f"{stack}_blocks" in names or f"{stack}_scales" in names or stack not in names

    def read(self, reader: WeightReader, count: int, in_features: int, part: Part) -> list[Weight]:
        """See ``StackFormat``."""
        if in_features % GROUP:
            raise CheckpointError(
                f"{reader.source.location}: {part.name} has rows of {in_features} features, in "
                f"MXFP4 no multiple of {GROUP}",
                "check that config and weights belong together",
            )
        groups = in_features // GROUP
        of_blocks, of_scales = (Part(f"{part.name}_{one}", count) for one in ("blocks", "scales"))
        blocks = reader.tensor(of_blocks, (part.rows, groups, GROUP // 2), torch.uint8)
        scales = reader.tensor(of_scales, (part.rows, groups), torch.uint8)
        require_scales(reader, of_scales.name, scales)
        columns = reader.share(part, (in_features,)).columns
        read = _expanded if len(columns) % GROUP else _kept
        return [read(reader, part, *one) for one in zip(blocks, scales, strict=True)]


def require_scales(reader: WeightReader, name: str, scales: Tensor) -> None:
    """Refuse bytes of scales that bf16 cannot hold.

    Raises:
        CheckpointError: one is above ``MAX_SCALE``.
    """
    if not scales.is_meta and (found := int(scales.max())) > MAX_SCALE:
        raise CheckpointError(
            f"tensor {name} of {reader.source.location} holds the scale {found}, above "
            f"{MAX_SCALE}, whose weights bf16 cannot hold",
            "download or convert the checkpoint again",
        )


def _kept(reader: WeightReader, part: Part, blocks: Tensor, scales: Tensor) -> Weight:
    """A matrix in 4 bits, and its scales in their bytes."""
    whole = packed_int4(halves(blocks).flatten(1), GROUP), scales
    values, own = (reader.share(part, (one.shape[1],)).of(one) for one in whole)
    matrix = Int4Matrix(values, own.view(torch.float8_e8m0fnu), None)
    return reader.kernels.pack_int4(matrix, reader.dtype)


def _expanded(reader: WeightReader, part: Part, blocks: Tensor, scales: Tensor) -> Weight:
    share = reader.share(part, (scales.shape[1] * GROUP,))
    return reader.kernels.pack(share.of(expanded(blocks, scales), reader.dtype))


def expanded(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, groups, 16] blocks and [rows, groups] scales to [rows, in_features] in fp32."""
    return (e2m1(blocks) * _powers(scales).unsqueeze(-1)).flatten(1)


def e2m1(packed: Tensor) -> Tensor:
    """Numbers of e2m1 in fp32, two of each byte, the low half first: [..., n] to [..., 2n]."""
    return torch.tensor(E2M1, dtype=torch.float32, device=packed.device)[halves(packed).int()]


def halves(packed: Tensor) -> Tensor:
    """The 4-bit codes of bytes, the low half first: [..., n] to [..., 2n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _powers(scales: Tensor) -> Tensor:
    """Numbers of E8M0 up to ``MAX_SCALE``, in fp32."""
    powers = [2.0 ** (byte - 127) for byte in range(MAX_SCALE + 1)]
    return torch.tensor(powers, dtype=torch.float32, device=scales.device)[scales.int()]

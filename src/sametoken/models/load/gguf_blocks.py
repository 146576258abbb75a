"""Matrices of a GGUF file that stay in the bits of its blocks: integers with scales by group.

Blocks of Q4_0, Q4_1 and Q8_0 have 32 features with scale and minimum in fp16, which are kept. Those
of Q4_K, Q5_K and Q6_K have 256, whose groups of 32, or 16 in Q6_K, scale a scale of the block: the
products of the two are kept, in fp32. On a CPU codes take 4 bits in Q4_0, Q4_1 and Q4_K, else 8. So
a weight takes 4.5, 5, 8.5, 6, 10 and 10 bits, where the file has 4.5, 5, 8.5, 4.5, 5.5 and 6.6. On
a GPU all scales are fp32, and codes of Q5_K and Q6_K take 6 bits: 5, 6, 9, 6, 8 and 8.

MXFP4 has 32 numbers of e2m1 and a power of two (``load.mxfp4``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from sametoken.models.load.linear_format import Quantization
from sametoken.models.load.mxfp4 import require_scales
from sametoken.models.load.sources import TensorSource, require_finite
from sametoken.models.load.weights import Part, WeightReader
from sametoken.ops.backend import Kernels
from sametoken.ops.model.gemm.int4 import packed_int4
from sametoken.ops.weight import Int4Matrix, IntegerMatrix, UnquantizedWeight, Weight

#: Groups of a block with a scale of its own, and features of a group.
_GROUPS, _WIDTH = 8, 32


class _InBlocks:
    __slots__ = ()

    def covers(self, source: TensorSource, module: str) -> bool:
        """See ``LinearFormat``."""
        return f"{module}.weight" in source.names()

    def expanded(self, reader: WeightReader, in_features: int, part: Part) -> Tensor:
        """See ``LinearFormat``."""
        return reader.tensor(part.tensor("weight"), (in_features,), torch.float32)


@dataclass(frozen=True, slots=True)
class BlockFormat(_InBlocks):
    """``TableFormat`` of matrices in blocks of integers, of one type."""

    type: GGMLQuantizationType

    def read(
        self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]
    ) -> UnquantizedWeight:
        """See ``TableFormat``."""
        matrix = _UNPACKED[self.type](_blocks(reader, self.type, in_features, parts))
        for values in (matrix.scale, matrix.minimum):
            if values is not None:
                require_finite(values, parts[0].tensor("weight").name, reader.source)
        return reader.kernels.pack_integers(matrix, reader.dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Blocks(_InBlocks):
    """``LinearFormat`` of matrices in blocks of MXFP4."""

    def read(self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]) -> Weight:
        """See ``LinearFormat``."""
        blocks = _blocks(reader, GGMLQuantizationType.MXFP4, in_features, parts)
        scales, codes = blocks.split((1, 16), dim=2)
        require_scales(reader, parts[0].tensor("weight").name, scales)
        values = packed_int4(_halves(codes).flatten(1), _WIDTH)
        scale = scales.flatten(1).contiguous().view(torch.float8_e8m0fnu)
        return reader.kernels.pack_int4(Int4Matrix(values, scale, None), reader.dtype)


@dataclass(frozen=True, slots=True)
class Blocks(Quantization):
    """``Quantization`` of a GGUF file.

    Attributes:
        types: the type of each tensor, by its Hugging Face name.
    """

    types: Mapping[str, GGMLQuantizationType]

    def require_products(self, kernels: Kernels) -> None:
        """See ``Quantization``: experts in blocks of integers."""
        if any(".experts." in name and kind in _UNPACKED for name, kind in self.types.items()):
            kernels.require_integer_experts()

    def format_of(self, module: str, source: TensorSource) -> BlockFormat | Mxfp4Blocks | None:
        """See ``Quantization``."""
        if self.types.get(f"{module}.weight") == GGMLQuantizationType.MXFP4:
            return Mxfp4Blocks()
        return self.format_of_table(module, source)

    def format_of_table(self, module: str, source: TensorSource) -> BlockFormat | None:
        """See ``Quantization``."""
        found = self.types.get(f"{module}.weight")
        return BlockFormat(found) if found in _UNPACKED else None


def _blocks(
    reader: WeightReader, kind: GGMLQuantizationType, in_features: int, parts: tuple[Part, ...]
) -> Tensor:
    """This rank's rows or columns of the parts, [rows, blocks, bytes] uint8."""
    elements, size = GGML_QUANT_SIZES[kind]
    group = f"a block of {elements} of {kind.name}"
    reader.require_whole_groups(in_features, parts, elements, group, "load_format 'gguf'")
    row_bytes = in_features // elements * size
    rows = [reader.stored(part.tensor("weight"), in_features, row_bytes) for part in parts]
    blocks: Tensor = torch.cat(rows).unflatten(1, (-1, size))
    return blocks


def _halves(packed: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2 * n] codes: the low halves of the bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _half_precision(stored: Tensor) -> Tensor:
    """[..., 2 * n] bytes to [..., n] fp16."""
    return stored.contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> IntegerMatrix:
    scale, codes = blocks.split((2, 16), dim=2)
    return IntegerMatrix(_halves(codes).flatten(1), 4, _half_precision(scale).flatten(1), 8)


def _q4_1(blocks: Tensor) -> IntegerMatrix:
    scale, minimum, codes = blocks.split((2, 2, 16), dim=2)
    scale, minimum = (_half_precision(one).flatten(1) for one in (scale, minimum))
    return IntegerMatrix(_halves(codes).flatten(1), 4, scale, minimum=minimum)


def _q8_0(blocks: Tensor) -> IntegerMatrix:
    scale, codes = blocks.split((2, 32), dim=2)
    # The top bit turns from a sign into 128.
    return IntegerMatrix((codes ^ 128).flatten(1), 8, _half_precision(scale).flatten(1), 128)


def _scales_and_minima(halves: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [N, groups]: 6-bit factors of 8 groups in 12 bytes, times the scales of a block."""
    low_scale, low_minimum, rest = packed.unflatten(2, (3, 4)).unbind(2)
    scale = torch.cat((low_scale & 63, rest & 15 | low_scale >> 2 & 48), dim=2)
    minimum = torch.cat((low_minimum & 63, rest >> 4 | low_minimum >> 2 & 48), dim=2)
    of_scales, of_minima = _half_precision(halves).float().split(1, dim=2)
    return (of_scales * scale).flatten(1), -(of_minima * minimum).flatten(1)


def _q4_k(blocks: Tensor) -> IntegerMatrix:
    halves, packed, codes = blocks.split((4, 12, 128), dim=2)
    scale, minimum = _scales_and_minima(halves, packed)
    return IntegerMatrix(
        _halves(codes.unflatten(2, (4, _WIDTH))).flatten(1), 4, scale, minimum=minimum
    )


def _q5_k(blocks: Tensor) -> IntegerMatrix:
    halves, packed, top, low = blocks.split((4, 12, 32, 128), dim=2)
    scale, minimum = _scales_and_minima(halves, packed)
    places = torch.arange(_GROUPS, dtype=torch.uint8, device=top.device)[:, None]
    low = _halves(low.unflatten(2, (4, _WIDTH))).unflatten(3, (2, _WIDTH)).flatten(2, 3)
    codes = low | (top[:, :, None] >> places & 1) << 4
    return IntegerMatrix(codes.flatten(1), 5, scale, minimum=minimum)


def _q6_k(blocks: Tensor) -> IntegerMatrix:
    low, top, factor, scale = blocks.split((128, 64, 16, 2), dim=2)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=top.device)[:, None]
    low = _halves(low.unflatten(2, (2, 64))).unflatten(3, (4, _WIDTH))
    codes = low | (top.unflatten(2, (2, 1, _WIDTH)) >> places & 3) << 4
    scales = _half_precision(scale).float() * factor.contiguous().view(torch.int8)
    return IntegerMatrix(codes.flatten(1), 6, scales.flatten(1), 32)


_UNPACKED: dict[GGMLQuantizationType, Callable[[Tensor], IntegerMatrix]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}

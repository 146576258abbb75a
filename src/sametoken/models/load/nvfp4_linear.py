"""Linears in NVFP4: compressed-tensors' ``nvfp4-pack-quantized``, and Model Optimizer's.

``X.weight_packed`` is uint8 [N, K / 2]: numbers of e2m1, two in a byte, the first in its low half.
``X.weight_scale`` is float8 e4m3 [N, K / 16], by row and 16 features, and ``X.weight_global_scale``
[1] fp32. An element is ``number * (scale * factor)``, whose factor is 1 / global scale in fp32.
Model Optimizer has ``X.weight`` and, as the factor itself, ``X.weight_scale_2``. The scale of
activations is for chips that multiply in 4 bits, and is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.models.load.fp8_linear import positive
from sametoken.models.load.mxfp4 import halves
from sametoken.models.load.sources import TensorSource
from sametoken.models.load.weights import Part, WeightReader
from sametoken.ops.model.gemm.int4 import elements, packed_int4
from sametoken.ops.weight import Int4Matrix, Weight

#: Features that share a scale.
GROUP = 16


class Names(NamedTuple):
    """What a writer calls a module's tensors, and whether it divides by the factor's."""

    packed: str
    factor: str
    divides: bool
    activations: str


COMPRESSED = Names("weight_packed", "weight_global_scale", True, "input_global_scale")
MODELOPT = Names("weight", "weight_scale_2", False, "input_scale")


@dataclass(frozen=True, slots=True)
class Nvfp4Linear:
    """``LinearFormat`` of NVFP4 weights."""

    names: Names = COMPRESSED

    def covers(self, source: TensorSource, module: str) -> bool:
        """See ``LinearFormat``."""
        names = source.names()
        return f"{module}.{self.names.factor}" in names or f"{module}.weight" not in names

    def read(self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]) -> Weight:
        """See ``LinearFormat``."""
        own = [self._matrix(reader, in_features, part) for part in parts]
        values, scales, factors = (
            torch.cat([getattr(one, name) for one in own]) for name in ("values", "scale", "factor")
        )
        whole = Int4Matrix(values, scales, None, factor=factors)
        return reader.kernels.pack_int4(whole, reader.dtype)

    def expanded(self, reader: WeightReader, in_features: int, part: Part) -> Tensor:
        """See ``LinearFormat``."""
        return elements(self._matrix(reader, in_features, part), torch.float32)

    def _matrix(self, reader: WeightReader, in_features: int, part: Part) -> Int4Matrix:
        """This rank's share of a part."""
        if in_features % GROUP:
            raise CheckpointError(
                f"{reader.source.location}: {part.name} has rows of {in_features} features, in "
                f"NVFP4 no multiple of {GROUP}",
                "check that config and weights belong together",
            )
        group = f"a group of {GROUP} that shares a scale"
        reader.require_whole_groups(in_features, (part,), GROUP, group)
        codes, of_groups = part.tensor(self.names.packed), part.tensor("weight_scale")
        packed = reader.tensor(codes, (in_features // 2,), torch.uint8)
        scales = reader.tensor(of_groups, (in_features // GROUP,), torch.float8_e4m3fn)
        if not scales.is_meta and (scales.view(torch.int8) < 0).any():
            raise CheckpointError(
                f"tensor {of_groups.name} of {reader.source.location} holds negative scales",
                "quantize the model again with its own library",
            )
        whole = positive(reader, f"{part.name}.{self.names.factor}", ((1,), ()))
        reader.skip(f"{part.name}.{self.names.activations}")
        factor = whole.reciprocal() if self.names.divides else whole
        factor = factor.to(scales.device).expand(scales.shape[0])
        return Int4Matrix(packed_int4(halves(packed), GROUP), scales, None, factor=factor)

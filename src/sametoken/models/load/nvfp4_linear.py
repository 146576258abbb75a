"""Linears in NVFP4, expanded as they are read: compressed-tensors' ``nvfp4-pack-quantized``.

``X.weight_packed`` is uint8 [N, K / 2]: numbers of e2m1, two in a byte, the first in its low half.
``X.weight_scale`` is float8 e4m3 [N, K / 16], by row and 16 features, and ``X.weight_global_scale``
[1] fp32. An element is ``number * (scale / global scale)``.

The quotient has fp32's digits, so bf16 does not hold it: an element is computed in fp32, and
rounded once to the dtype of the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, ConfigError
from sametoken.models.load.fp8_linear import positive
from sametoken.models.load.mxfp4 import e2m1
from sametoken.models.load.weights import Part, Split, TensorSource, WeightReader, rows_per_chunk
from sametoken.ops.weight import Weight

#: Features that share a scale.
GROUP = 16


@dataclass(frozen=True, slots=True)
class Nvfp4Linear:
    """``LinearFormat`` of NVFP4 weights, whose products are those of unquantized ones."""

    def covers(self, source: TensorSource, module: str) -> bool:
        """See ``LinearFormat``."""
        names = source.names()
        return f"{module}.weight_packed" in names or f"{module}.weight" not in names

    def read(self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]) -> Weight:
        """See ``LinearFormat``."""
        chunks = [
            chunk.to(reader.dtype)
            for part in parts
            for chunk in self._chunks(reader, in_features, part)
        ]
        return reader.kernels.pack(torch.cat(chunks))

    def expanded(self, reader: WeightReader, in_features: int, part: Part) -> Tensor:
        """See ``LinearFormat``."""
        return torch.cat(list(self._chunks(reader, in_features, part)))

    def _chunks(self, reader: WeightReader, in_features: int, part: Part) -> Iterator[Tensor]:
        """This rank's share of a part in fp32, some rows at a time."""
        self._require_whole_groups(reader, in_features, part)
        packed = reader.filled(
            (replace(part, name=f"{part.name}.weight_packed"),), (in_features // 2,), torch.uint8
        )
        scales = reader.filled(
            (replace(part, name=f"{part.name}.weight_scale"),),
            (in_features // GROUP,),
            torch.float8_e4m3fn,
        )
        whole = float(positive(reader, f"{part.name}.weight_global_scale", ((1,), ())))
        step = rows_per_chunk(2 * packed.shape[1])
        for numbers, scale in zip(packed.split(step), scales.split(step), strict=True):
            by_group = e2m1(numbers).unflatten(1, (-1, GROUP))
            yield (by_group * (scale.float() / whole).unsqueeze(-1)).flatten(1)

    def _require_whole_groups(self, reader: WeightReader, in_features: int, part: Part) -> None:
        size = reader.parallel.size
        if in_features % GROUP:
            raise CheckpointError(
                f"{reader.source.location}: {part.name} has rows of {in_features} features, in "
                f"NVFP4 no multiple of {GROUP}",
                "check that config and weights belong together",
            )
        if part.split is Split.COLUMNS and in_features % (size * GROUP):
            raise ConfigError(
                f"tensor_parallel_size={size} cuts the {in_features} features of {part.name} "
                f"within a group of {GROUP} that shares a scale",
                f"use a size that gives each rank a multiple of {GROUP}, or 1",
            )

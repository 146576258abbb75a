"""Linears in float8 e4m3: a matrix and its scales, read from a checkpoint.

``X.weight`` is stored as float8 e4m3 [N, K]. Its scales are factors, in a floating dtype: [] or
[1] (tensor), [N, 1] or [N] (channel), or [ceil(N / 128), ceil(K / 128)], by block of 128 x 128.
They are read as scales of rows, or of rows and 128 features, which have the same values: so parts
may be fused, divided among ranks and permuted row by row. A static scale of activations is
``X.input_scale`` (compressed-tensors, vLLM) or ``X.activation_scale`` (transformers).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.models.load.sources import FLOATING, TensorSource
from sametoken.models.load.weights import Part, WeightReader
from sametoken.ops.weight import Fp8Matrix, Rounding, Weight

#: Rows and features of a block that shares a scale; features of a group of activations.
BLOCK = 128
_INPUT_SCALES = ("input_scale", "activation_scale")
_AGAIN = "download or convert the checkpoint again"


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """``LinearFormat`` of float8 weights.

    Attributes:
        scales: of weights, by "tensor", "channel" or "block".
        activations: whether they are not rounded ("none"), or by "token", "group", "group_ue8m0"
            (dynamic) or "tensor" (static).
        scale_names: names of the tensor with a weight's scales; the first that exists is read.
    """

    scales: str
    activations: str
    scale_names: tuple[str, ...]

    def covers(self, source: TensorSource, module: str) -> bool:
        """See ``LinearFormat``."""
        names = source.names()
        own = any(f"{module}.{name}" in names for name in self.scale_names)
        weight = f"{module}.weight"
        return own or weight not in names or source.stored_dtype(weight) not in FLOATING

    def read(self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]) -> Weight:
        """See ``LinearFormat``."""
        self._require_whole_groups(reader, in_features, parts)
        fixed = {part.name: self._input_scale(reader, part) for part in parts}
        weights = [
            self._packed(reader, in_features, tuple(run), scale)
            for scale, run in groupby(parts, key=lambda part: fixed[part.name])
        ]
        return weights[0] if len(weights) == 1 else reader.kernels.stack(weights)

    def expanded(self, reader: WeightReader, in_features: int, part: Part) -> Tensor:
        """See ``LinearFormat``."""
        self._require_whole_groups(reader, in_features, (part,))
        self._input_scale(reader, part)
        values, scales = self._matrix(reader, in_features, (part,))
        if scales.dim() == 1:
            return values.float() * scales[:, None]
        by_feature = scales.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
        return values.float() * by_feature

    def _matrix(
        self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]
    ) -> tuple[Tensor, Tensor]:
        """Values of the parts, and their scales by row or by row and group."""
        matrices = tuple(part.tensor("weight") for part in parts)
        values = reader.filled(matrices, (in_features,), torch.float8_e4m3fn)
        return values, torch.cat([self._scales(reader, in_features, part) for part in parts])

    def _packed(
        self, reader: WeightReader, in_features: int, parts: tuple[Part, ...], fixed: float | None
    ) -> Weight:
        """Parts with one scale of activations, or none."""
        values, scales = self._matrix(reader, in_features, parts)
        rounding = None
        if self.activations != "none":
            scale = (
                None
                if fixed is None
                else torch.tensor(fixed, dtype=torch.float32, device=reader.device)
            )
            rounding = Rounding(self._by_group, scale, self.activations == "group_ue8m0")
        blocks = self.scales == "block" and self._are_whole(reader, parts)
        return reader.kernels.pack_fp8(Fp8Matrix(values, scales, rounding, blocks), reader.dtype)

    @property
    def _by_group(self) -> bool:
        return self.activations in ("group", "group_ue8m0")

    def _scales(self, reader: WeightReader, in_features: int, part: Part) -> Tensor:
        """This rank's scales of a part: [rows], or [rows, groups of features]."""
        groups = -(-in_features // BLOCK)
        shapes = {
            "tensor": ((), (1,)),
            "channel": ((part.rows, 1), (part.rows,)),
            "block": ((-(-part.rows // BLOCK), groups),),
        }[self.scales]
        scale = positive(reader, _existing(reader, part.name, self.scale_names), shapes)
        if self.scales == "block":
            by_row = scale.repeat_interleave(BLOCK, dim=0)[: part.rows]
            share = reader.share(part, (groups,))
        else:
            by_row = scale.reshape(-1).expand(part.rows)
            share = reader.share(part.of_rows(), ())
        return share.of(by_row, device=reader.device)

    def _are_whole(self, reader: WeightReader, parts: tuple[Part, ...]) -> bool:
        """Whether each 128 rows of this rank's shares, one after the other, are of one block."""
        blocks = torch.cat(
            [
                reader.share(part.of_rows(), ()).of(
                    torch.arange(part.rows) // BLOCK + (place << 32)
                )
                for place, part in enumerate(parts)
            ]
        )
        return torch.equal(blocks, blocks[torch.arange(len(blocks)) // BLOCK * BLOCK])

    def _input_scale(self, reader: WeightReader, part: Part) -> float | None:
        """The static scale of a part's activations; None without one."""
        if self.activations != "tensor":
            return None
        name = _existing(reader, part.name, _INPUT_SCALES)
        return float(positive(reader, name, ((), (1,))))

    def _require_whole_groups(
        self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]
    ) -> None:
        if self.scales == "block" or self._by_group:
            group = f"a block of {BLOCK} that shares a scale"
            reader.require_whole_groups(in_features, parts, BLOCK, group)


def _existing(reader: WeightReader, module: str, names: tuple[str, ...]) -> str:
    """The first of the names that the module has a tensor of; else the first."""
    full = [f"{module}.{name}" for name in names]
    return next((name for name in full if name in reader), full[0])


def positive(reader: WeightReader, name: str, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """A tensor of scales in fp32, of one of the shapes."""
    scale = reader.small(name, shapes)
    if not (scale > 0).all():
        raise CheckpointError(
            f"tensor {name} of {reader.source.location} holds scales that are not positive", _AGAIN
        )
    return scale

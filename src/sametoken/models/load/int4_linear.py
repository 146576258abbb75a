"""Linears in 4 bits: GPTQ, AWQ and compressed-tensors' ``pack-quantized``, read into one layout.

Each stores unsigned values and zeros of 4 bits, eight to an int32, lowest bits first, with a scale
per row and group of features (G groups; one for all features if the group size is -1):

- GPTQ: ``qweight`` [K / 8, N] packed along K, ``qzeros`` [G, N / 8], ``scales`` [G, N], and
  ``g_idx`` [K], the group of each feature, arbitrary under act-order. Zeros are stored less 1, in
  the format ``gptq_v2`` as they are; symmetric ones are 8, and writers differ in what they store.
- AWQ (version gemm): ``qweight`` [K, N / 8], ``qzeros`` and ``scales`` likewise; eight neighbouring
  rows stand in the order of ``_AWQ``.
- ``pack-quantized``: ``weight_packed`` [N, ceil(K / 8)], ``weight_scale`` [N, G], ``weight_shape``
  [2], ``weight_zero_point`` [ceil(N / 8), G] unless symmetric, ``weight_g_idx`` [K] if ordered.

Scales may have any sign: AutoRound writes negative ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.load.settings import ANOTHER
from sametoken.models.load.sources import FLOATING, TensorSource
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.model.gemm.int4 import packed_int4
from sametoken.ops.weight import Int4Matrix, Weight

GPTQ, GPTQ_V2, AWQ = "gptq", "gptq_v2", "awq"
PACKED: str = "pack-quantized"
#: Features of a group that the products have.
WIDTHS = (128, 64, 32)
#: Where AWQ puts each of eight neighbouring rows.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
_PLAIN = tuple(range(8))
_SYMMETRIC_ZERO = 8
_TOGETHER = "check that config and weights belong together"


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A whole part: values [N, K] and zeros [N, G] uint8, scales [N, G], order as in the matrix."""

    values: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """``LinearFormat`` of 4-bit weights.

    Attributes:
        layout: one of the above.
        group_size: features of a group; -1: all.
        symmetric: whether zeros are 8 whatever is stored; ``pack-quantized`` stores none.
    """

    layout: str
    group_size: int
    symmetric: bool = False

    def covers(self, source: TensorSource, module: str) -> bool:
        """See ``LinearFormat``."""
        names = source.names()
        main = "weight_packed" if self.layout == PACKED else "qweight"
        return f"{module}.{main}" in names or f"{module}.weight" not in names

    def read(self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]) -> Weight:
        """See ``LinearFormat``."""
        width = self._width(reader, in_features, parts)
        unpacked = [(part, self._unpacked(reader, in_features, part)) for part in parts]
        weights = []
        # Parts that order their columns alike are one matrix.
        for order, run in groupby(unpacked, key=lambda one: _key(one[1].order)):
            own = [_own(reader, part, whole, width) for part, whole in run]
            matrix = Int4Matrix(
                torch.cat([packed_int4(one.values, width) for one in own]),
                torch.cat([one.scale for one in own]),
                torch.cat([one.zero for one in own]),
                None if order is None else own[0].order,
            )
            weights.append(reader.kernels.pack_int4(matrix, reader.dtype))
        return weights[0] if len(weights) == 1 else reader.kernels.stack(weights)

    def expanded(self, reader: WeightReader, in_features: int, part: Part) -> Tensor:
        """See ``LinearFormat``."""
        width = self._width(reader, in_features, (part,))
        own = _own(reader, part, self._unpacked(reader, in_features, part), width)
        scale, zero = (one.float().repeat_interleave(width, 1) for one in (own.scale, own.zero))
        values = (own.values.float() - zero) * scale
        return values if own.order is None else values[:, own.order.argsort()]

    def _width(self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]) -> int:
        """Features of a group of the products, which divide the checkpoint's and the ranks'."""
        name = parts[0].name
        whole = in_features if self.group_size == -1 else self.group_size
        if in_features % whole:
            raise UnsupportedError(
                f"{name} of {reader.source.location} has {in_features} features, no multiple of "
                f"group_size={whole}",
                "use a checkpoint with another group size",
            )
        if whole % WIDTHS[-1]:
            raise UnsupportedError(
                f"{name} of {reader.source.location} has groups of {whole} features",
                f"use a checkpoint with groups of a multiple of {WIDTHS[-1]}",
            )
        reader.require_whole_groups(in_features, parts, WIDTHS[-1], f"a group of {whole}")
        divided = any(part.split is Split.COLUMNS for part in parts)
        own = in_features // (reader.parallel.size if divided else 1)
        return next(one for one in WIDTHS if whole % one == 0 and own % one == 0)

    def _unpacked(self, reader: WeightReader, in_features: int, part: Part) -> _Unpacked:
        groups = 1 if self.group_size == -1 else in_features // self.group_size
        read = self._packed if self.layout == PACKED else self._gptq_or_awq
        values, scale, zero = read(reader, in_features, groups, part)
        prefix = "weight_" if self.layout == PACKED else ""
        order = _order(reader, f"{part.name}.{prefix}g_idx", in_features, groups)
        return _Unpacked(values if order is None else values[:, order], scale, zero, order)

    def _gptq_or_awq(
        self, reader: WeightReader, in_features: int, groups: int, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        name, rows = part.name, part.rows
        _require_eights(reader, name, rows, in_features)
        places = _AWQ if self.layout == AWQ else _PLAIN
        if self.layout == AWQ:
            values = _nibbles(_words(reader, f"{name}.qweight", in_features, rows // 8), 1, places)
        else:
            values = _nibbles(_words(reader, f"{name}.qweight", in_features // 8, rows), 0, places)
        zero = _nibbles(_words(reader, f"{name}.qzeros", groups, rows // 8), 1, places)
        if self.symmetric:
            zero.fill_(_SYMMETRIC_ZERO)
        elif self.layout == GPTQ:
            zero += 1
        return values.t(), _scales(reader, f"{name}.scales", groups, rows).t(), zero.t()

    def _packed(
        self, reader: WeightReader, in_features: int, groups: int, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        name, rows = part.name, part.rows
        _require_stored_shape(reader, f"{name}.weight_shape", [rows, in_features])
        words = _words(reader, f"{name}.weight_packed", rows, -(-in_features // 8))
        values = _nibbles(words, 1, _PLAIN)[:, :in_features]
        scale = _scales(reader, f"{name}.weight_scale", rows, groups)
        if self.symmetric:
            return values, scale, torch.full_like(scale, _SYMMETRIC_ZERO, dtype=torch.uint8)
        zeros = _words(reader, f"{name}.weight_zero_point", -(-rows // 8), groups)
        return values, scale, _nibbles(zeros, 0, _PLAIN)[:rows]


def _require_stored_shape(reader: WeightReader, name: str, expected: list[int]) -> None:
    """Dummy weights have no such tensor."""
    if name not in reader:
        return
    # transformers saves it again in 32 bits.
    narrow = reader.source.stored_dtype(name) == torch.int32
    shape = reader.tensor(Part(name, 2), (), torch.int32 if narrow else torch.int64).tolist()
    if shape != expected:
        raise CheckpointError(
            f"tensor {name} of {reader.source.location} says {shape}, "
            f"the config expects {expected}",
            _TOGETHER,
        )


def _key(order: Tensor | None) -> tuple[int, ...] | None:
    return None if order is None else tuple(order.tolist())


def _words(reader: WeightReader, name: str, rows: int, columns: int) -> Tensor:
    """A tensor of packed values: [rows, columns] int32."""
    return reader.tensor(Part(name, rows), (columns,), torch.int32)


def _nibbles(words: Tensor, dim: int, places: tuple[int, ...]) -> Tensor:
    """Eight uint8 for each int32, along ``dim``: those at the given places in turn."""
    parts = [(words >> 4 * place & 15).to(torch.uint8) for place in places]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _scales(reader: WeightReader, name: str, rows: int, columns: int) -> Tensor:
    """[rows, columns] in the stored dtype of at most 32 bits."""
    stored = reader.source.stored_dtype(name) if name in reader else reader.dtype
    fits = stored in FLOATING and stored.itemsize <= 4
    return reader.tensor(Part(name, rows), (columns,), stored if fits else torch.float32)


def _order(reader: WeightReader, name: str, in_features: int, groups: int) -> Tensor | None:
    """The features by group, from the group of each; None if they stand so, or none is stored."""
    if name not in reader:
        return None
    index = reader.tensor(Part(name, in_features), (), torch.int32)
    order = index.argsort(stable=True)
    by_group = torch.arange(in_features, device=index.device) // (in_features // groups)
    if not torch.equal(index[order].long(), by_group):
        raise CheckpointError(
            f"tensor {name} of {reader.source.location} does not give each of {groups} groups "
            f"{in_features // groups} features",
            _TOGETHER,
        )
    return None if torch.equal(order, torch.arange(in_features, device=order.device)) else order


def _require_eights(reader: WeightReader, name: str, rows: int, in_features: int) -> None:
    if rows % 8 or in_features % 8:
        raise UnsupportedError(
            f"{name} of {reader.source.location} is {rows} x {in_features}, which int32 cannot "
            "hold in eights",
            ANOTHER,
        )


def _own(reader: WeightReader, part: Part, whole: _Unpacked, width: int) -> _Unpacked:
    """This rank's rows and columns; scales and zeros by groups of ``width`` features."""
    columns = whole.values.shape[1]
    if part.split is Split.COLUMNS and reader.parallel.size > 1 and whole.order is not None:
        raise ConfigError(
            f"tensor_parallel_size={reader.parallel.size} cannot divide the features of "
            f"{part.name}, which act-order permutes",
            "use 1, or a checkpoint without act-order",
        )
    repeats = columns // width // whole.scale.shape[1]
    scale, zero = (one.repeat_interleave(repeats, 1) for one in (whole.scale, whole.zero))
    groups = reader.share(part, (columns // width,))
    return _Unpacked(
        reader.share(part, (columns,)).of(whole.values),
        groups.of(scale),
        groups.of(zero),
        whole.order,
    )

"""The tile of a program in the products of experts; none changes the bits of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.gemm.fp8 import GROUP

#: The most rows of an expert, in the mean: of a request or two, of small and of large decode steps,
#: of small prompts.
_LONE, _FEW, _SEVERAL, _SOME = 0.25, 2, 24, 64
_MANY = math.inf


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """A program's tile, as ``TritonConfig``.

    Attributes:
        rows: of activations.
        features: rows of the weight, of gate and of up each.
        depth: elements of the sum per loop iteration.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        tma: load weights, and rows that lie one after the other, through tensor descriptors.
        programs: for each tile of an expert's mean rows. Routers have favourites, and rows of
            padding choose the same experts.
    """

    rows: int
    features: int
    depth: int
    num_warps: int
    num_stages: int
    tma: bool = False
    programs: int = 4

    def shares(self, mean_rows: float) -> int:
        """Programs for an expert's rows and a tile of features; one where experts have few."""
        return self.programs * cdiv(int(mean_rows), self.rows) if mean_rows > _FEW else 1


# On Hopper. Gated tiles hold gate and up. Float8 sums by group need a second accumulator, and rows
# of 16 bits more shared memory, so their tiles are smaller than those of whole float8 sums.
_HOPPER = {
    (_LONE, 1): ExpertTile(16, 64, 128, 4, 4, tma=True),
    (_LONE, 2): ExpertTile(16, 64, 128, 4, 4, tma=True),
    (_FEW, 1): ExpertTile(16, 64, 128, 4, 4),
    (_FEW, 2): ExpertTile(16, 64, 128, 4, 3),
    (_SEVERAL, 1): ExpertTile(32, 64, 128, 4, 4),
    (_SEVERAL, 2): ExpertTile(32, 64, 128, 4, 4),
    (_SOME, 2): ExpertTile(64, 128, 64, 8, 4, tma=True),
}
_HOPPER_GATED = _HOPPER | {
    (_SOME, 1): ExpertTile(64, 64, 128, 4, 4),
    (_MANY, 1): ExpertTile(64, 64, 128, 4, 4),
    (_MANY, 2): ExpertTile(128, 128, 64, 8, 4, tma=True),
}
_HOPPER_PLAIN = _HOPPER | {
    (_SOME, 1): ExpertTile(64, 128, 128, 4, 4, tma=True),
    (_MANY, 1): ExpertTile(64, 128, 128, 4, 4, tma=True),
    (_MANY, 2): ExpertTile(128, 256, 64, 8, 3, tma=True),
}
_WHOLE_SUMS_GATED = ExpertTile(128, 128, 128, 8, 4, tma=True, programs=2)
_WHOLE_SUMS_PLAIN = ExpertTile(128, 256, 128, 8, 4, tma=True, programs=2)


def panels_tile(mean_rows: float, gated: bool, hopper: bool) -> ExpertTile:
    """The tile of a product of weights in 4 bits; arguments as ``expert_tile``."""
    if mean_rows <= 24:
        return ExpertTile(16 if mean_rows <= 8 else 32, 32 if gated else 64, 64, 4, 4)
    if mean_rows <= 128:
        return ExpertTile(64, 64 if gated else 128, 64, 4, 3, programs=2)
    return ExpertTile(128, 64, 64, 4, 3 if hopper else 2, programs=2)


def expert_tile(
    mean_rows: float,
    out_features: int,
    in_features: int,
    weight_bytes: int,
    gated: bool,
    hopper: bool,
    whole_sums: bool = False,
) -> ExpertTile:
    """The tile of a product.

    Args:
        mean_rows: rows of an expert, if all have equally many.
        out_features: after the gate.
        in_features: elements of a sum.
        weight_bytes: bytes of an element of the weight.
        gated: gate and up are one product.
        hopper: the chip is a Hopper or newer, with its shared memory.
        whole_sums: weights and rows are float8 with a scale for each of theirs.
    """
    if hopper and weight_bytes <= 2 and in_features * weight_bytes % 16 == 0:
        most = next(size for size in (_LONE, _FEW, _SEVERAL, _SOME, _MANY) if mean_rows <= size)
        if whole_sums and most == _MANY:
            return _WHOLE_SUMS_GATED if gated else _WHOLE_SUMS_PLAIN
        return (_HOPPER_GATED if gated else _HOPPER_PLAIN)[most, weight_bytes]
    rows = 16 if mean_rows <= _SOME else 64
    features, depth = (min(max(next_power_of_2(n), 16), 64) for n in (out_features, in_features))
    num_stages = 3 if weight_bytes == 4 else 4
    return ExpertTile(rows, features, GROUP if weight_bytes == 1 else depth, 4, num_stages)

"""A whole decoder layer, for backends that run it in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, Norm, QKNorm, RotaryTable
from sametoken.ops.weight import Weight

#: More rows take so long that the calls of single operations do not count.
WHOLE_LAYER_ROWS = 64


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of attention and a gated MLP, each added to the residual stream and normed.

    Attributes:
        shape, rotary, qk_norm, sinks: as ``Kernels.rope_and_cache`` and ``attention`` take them.
        qkv, output: the projections of attention, with their biases.
        norm: of the residual stream between the two.
        gate_up, down: the projections of the MLP, without biases.
    """

    shape: AttentionShape
    rotary: RotaryTable
    qk_norm: QKNorm | None
    sinks: Tensor | None
    qkv: tuple[Weight, Tensor | None]
    output: tuple[Weight, Tensor | None]
    norm: Norm
    gate_up: Weight
    down: Weight


class WholeLayer(Protocol):
    """A layer in one call, with the bits of its operations one by one."""

    def __call__(
        self, x: Tensor, residual: Tensor, following: Norm, rows: AttentionRows, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        """Run at most ``WHOLE_LAYER_ROWS`` rows; otherwise as ``layers.residual.Layer``."""
        ...

"""Whole decoder layers, for backends that run them in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    KeptRows,
    Norm,
    QKNorm,
    RotaryTable,
)
from sametoken.ops.weight import Weight

#: More rows take so long that the calls of single operations do not count.
WHOLE_LAYER_ROWS = 64


def serves(num_rows: int, kept: KeptRows | None) -> bool:
    """Whether layers may run in one call; static shapes may keep more rows than there are."""
    return num_rows <= WHOLE_LAYER_ROWS and (kept is None or len(kept.index) <= num_rows)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of attention and a gated MLP, each added to the residual stream and normed.

    Attributes:
        shape, rotary, qk_norm, sinks: as ``Kernels.rope_and_cache`` and ``attention`` take them.
        qkv, output: the projections of attention, with their biases.
        norm: of the residual stream between the two.
        gate_up, down: the projections of the MLP, without biases.
        following: the norm of the residual stream after the layer.
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
    following: Norm


class WholeLayers(Protocol):
    """Successive layers in one call, with the bits of their operations one by one."""

    @property
    def ends(self) -> Sequence[int]:
        """By layer, the one after the last of a call that begins with it; itself: none may."""
        ...

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        layers: range,
        rows: AttentionRows,
        memory: Sequence[object],
        kept: KeptRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run these layers over rows that ``serves`` allows.

        Args:
            x: [T, qkv's in_features, at least hidden], the first layer's norm of ``residual``; its
                memory is reused.
            residual: [T, hidden]; likewise.
            layers: within ``ends``.
            rows: of the pass.
            memory: of every layer of the model, ``LayerKV`` where a layer is run.
            kept: the rows to return; the others run only for their KV. None: all.

        Returns:
            The last layer's ``following`` of the residual stream after it, and that stream:
            [T, hidden], or [R, hidden] of those kept.
        """
        ...

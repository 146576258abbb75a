"""The gated feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.layers.linear import Linear, Projection


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up fused into [gate | up], without biases."""

    gate_up: Linear
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.gate_up.weight.gated_matmul(x))

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        return self.gate_up.nbytes + self.down.nbytes

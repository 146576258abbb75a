"""The Gated DeltaNet block: linear attention whose memory is one state per slot."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.kernels.interface import Kernels
from sametoken.layers.linear import Linear, Projection
from sametoken.state.recurrent import GatedDeltaParams, RecurrentPass, RecurrentSpec


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One Gated DeltaNet block, or the heads of it that are on this rank.

    Attributes:
        spec: head counts of this rank, and sizes.
        projection: fused projection to [q | k | v | z | b | a].
        params: weights of the convolution and of the gates.
        norm_weight: [value_dim], of the norm of every value head's output, before the gate z.
        eps: of that norm.
        output: projection of the value heads back to the hidden size.
    """

    kernels: Kernels
    spec: RecurrentSpec
    projection: Linear
    params: GatedDeltaParams
    norm_weight: Tensor
    eps: float
    output: Projection

    def __call__(self, x: Tensor, step: RecurrentPass, layer: int) -> Tensor:
        """[T, hidden] -> [T, hidden]; advances the rows' slots.

        Args:
            x: [T, hidden].
            step: the pass over the recurrent state.
            layer: index among the layers with recurrent state.
        """
        heads, width = self.spec.num_value_heads, self.spec.num_value_heads * self.spec.value_dim
        sizes = (self.spec.conv_channels, width, heads, heads)
        mixed_qkv, z, b, a = self.projection(x).split(sizes, dim=-1)
        attended = step.run(layer, mixed_qkv, a, b, self.params)
        return self.output(self.kernels.gated_rms_norm(attended, z, self.norm_weight, self.eps))

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        return self.projection.nbytes + self.output.nbytes

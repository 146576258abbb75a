"""The Gated DeltaNet block: linear attention whose memory is one state per slot."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.kernels.gated_delta_rule.rule import GatedDeltaParams
from sametoken.kernels.interface import Kernels
from sametoken.kernels.recurrent.rule import LayerMemory, RawRows, RecurrentPass
from sametoken.layers.linear import Linear, Projection


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One Gated DeltaNet block, or the heads of it that are on this rank.

    Attributes:
        projection: fused projection to [q | k | v | z | b | a].
        params: weights of the convolution and of the gates, and the sizes of this rank.
        norm_weight: [value_dim], of the norm of every value head's output, before the gate z.
        eps: of that norm.
        output: projection of the value heads back to the hidden size.
    """

    kernels: Kernels
    projection: Linear
    params: GatedDeltaParams
    norm_weight: Tensor
    eps: float
    output: Projection

    def __call__(self, x: Tensor, step: RecurrentPass, memory: LayerMemory) -> Tensor:
        """[T, hidden] -> [T, hidden]; advances the rows' slots.

        Args:
            x: [T, hidden].
            step: the pass over the recurrent state.
            memory: what the slots keep in this layer.
        """
        rule = self.params.rule
        sizes = (rule.conv_channels, rule.out_features, *rule.gate_sizes)
        mixed_qkv, z, b, a = self.projection(x).split(sizes, dim=-1)
        attended = step.run(self.params, RawRows(mixed_qkv, (a, b)), memory)
        return self.output(self.kernels.gated_rms_norm(attended, z, self.norm_weight, self.eps))

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        return self.projection.nbytes + self.output.nbytes
